"""Small files of each format, made in code: the records as the frameworks write them."""
