-- The service that uses the database; see Database.migrate.
CREATE TABLE service_owner (
  id TEXT NOT NULL,
  place TEXT NOT NULL
);
-- Texts of a version's data that have more characters than cut_to are cut; 0: none are. cut is how
-- many were.
ALTER TABLE versions ADD COLUMN cut_to BIGINT NOT NULL DEFAULT 0;
ALTER TABLE versions ADD COLUMN cut BIGINT NOT NULL DEFAULT 0;
