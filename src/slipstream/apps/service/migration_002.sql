-- The rate of the running attempt, by its lines of progress, tells the time left.
ALTER TABLE jobs ADD COLUMN updates_s DOUBLE PRECISION NOT NULL DEFAULT 0;
ALTER TABLE jobs DROP COLUMN attempt_started;
