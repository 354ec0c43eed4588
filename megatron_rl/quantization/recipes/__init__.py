"""One file per recipe; it defines ``RECIPE``, and its file name is the recipe's name."""
