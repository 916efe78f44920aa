"""One request as a whole: the model it asks for, its sequence, its books, and how it is continued after a break."""
