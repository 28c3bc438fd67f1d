"""Time and power of every setting, predicted from a few measured ones."""
