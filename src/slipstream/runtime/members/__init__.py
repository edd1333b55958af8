"""A member of a job: its messages, who is there, how ranks meet and part."""
