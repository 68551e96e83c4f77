"""Functions that Dynamo compiles for our backend: their graphs, first runs, and graph breaks."""
