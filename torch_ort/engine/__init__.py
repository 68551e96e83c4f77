"""Compiles captured graphs: passes, memory plan, files and dumps, and watchers of these."""
