"""What each route does, one file a group of routes."""
