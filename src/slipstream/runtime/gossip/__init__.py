"""Partial exchange between peers, and the return of a restarted worker."""
