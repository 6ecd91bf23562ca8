"""What operators ask, answered as plain values: dataclasses that are JSON but for the braces.

Nothing here prints, and nothing here changes anything, but for the functions that say so.
"""
