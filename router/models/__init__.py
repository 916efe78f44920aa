"""The models that a router serves.

table       names that clients use -> the release that serves a request
entry       everything that a router has for one model
follower    follows the announcements of models, and adds and removes entries
files       gets the files of an announced model from its workers or its controller, and keeps them in the cache folder
operated    the models as operators name them
"""

__all__ = ["entry", "files", "follower", "operated", "table"]
