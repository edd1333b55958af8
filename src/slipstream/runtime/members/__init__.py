"""A member of a job: its messages, the other members, joining and leaving."""
