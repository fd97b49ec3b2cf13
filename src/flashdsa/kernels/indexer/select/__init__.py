"""The exact best of a row, whoever scores it: the list, the threshold, the CTAs that share it."""
