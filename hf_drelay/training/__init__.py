"""Training of drafters: responses -> features -> joint loss -> checkpoint."""
