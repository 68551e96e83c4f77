"""Capture of Dynamo graphs and of modules, by the recorder or by AOTAutograd."""
