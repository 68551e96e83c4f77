"""What other libraries know of this package, and classes of theirs that train with it.

Nothing here imports those libraries before the user does.
"""
