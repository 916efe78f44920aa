"""Programs that run in a checkout only: what they read and write is not in a wheel or an image.

dashboards   Grafana dashboards and the catalogue of metrics, from the instruments
api_docs     the tables of docs/http.md, from the declared fields
chart_docs   the chart's schema and table of values, from the settings
reference_docs  the tables of docs/configuration.md and docs/grpc.md, from settings, protos and errors
site         the documents as a site, with mkdocs
images       builds both images with docker or buildah, and tries them
lock         the images' locks, from what uv resolved: exact versions with the hash of each file
release      one version everywhere, and the images of a release by their digests
model_docs   the table of docs/models.md, from what the models answer
mutants      faults of one line, each of which a test must see
walk         the files that a prompt passes, from a traced request
"""

__all__ = [
    "api_docs",
    "chart_docs",
    "dashboards",
    "images",
    "lock",
    "model_docs",
    "mutants",
    "reference_docs",
    "release",
    "site",
    "walk",
]
