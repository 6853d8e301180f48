"""Any picture of a digit -> one like those of the training set; service/images.py is the door to it."""
