"""Who holds what: boxes of the checkpoint's parameters, and where they are in registered memory.

holdings.py is the data; memory.py, torch_tensors.py and checkpoint.py make it from arrays, tensors and files;
mapping.py and families.py translate frameworks' names; models.py has large models without their memory.
"""
