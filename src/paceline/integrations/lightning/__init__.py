"""`paceline.lightning`: trains a LightningModule, and lends Lightning's own loop Paceline's transport."""
