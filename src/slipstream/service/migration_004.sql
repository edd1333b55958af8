-- The service that uses the database; see Database.migrate.
CREATE TABLE service_owner (
  id TEXT NOT NULL,
  place TEXT NOT NULL
);
