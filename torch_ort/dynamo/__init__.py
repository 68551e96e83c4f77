"""Functions that Dynamo compiles for our backend: graphs, first runs, what it leaves out."""
