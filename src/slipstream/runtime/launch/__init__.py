"""Starting the processes of a job, watching them, and leaving none behind."""
