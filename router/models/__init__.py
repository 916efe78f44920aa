"""The models that a router serves, besides the one of its own configuration.

files   gets the files of an announced model from its workers or its controller, and keeps them in the cache folder
"""

from router.models.files import ModelFileCache

__all__ = ["ModelFileCache"]
