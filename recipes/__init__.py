"""Recipes: functions that assemble nodes into a loader, and what they need to show themselves."""
