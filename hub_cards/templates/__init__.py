"""What is published beside weights and code: the model card's template and the patch-free `generate` function."""
