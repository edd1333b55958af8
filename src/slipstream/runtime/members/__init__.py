"""A member of a job: its messages, its view of other members, joining and leaving."""
