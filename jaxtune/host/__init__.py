"""The process around the devices: its start and its end, the folder of a run and the lock on it, plugins, and what is
checked before anything is read.
"""
