"""Makes any picture of a digit look like the training set; service/images.py is the way in."""
