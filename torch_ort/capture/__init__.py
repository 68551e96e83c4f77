"""Captures: Dynamo's graphs and ORTModules, by the recorder or by AOTAutograd."""
