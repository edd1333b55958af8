-- One schema for SQLite and PostgreSQL. Times are milliseconds since 1970 (UTC).
CREATE TABLE tenants (
  id TEXT PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  quota BIGINT NOT NULL,
  created BIGINT NOT NULL
);
CREATE TABLE api_keys (
  hash TEXT PRIMARY KEY,
  tenant TEXT NOT NULL REFERENCES tenants (id),
  prefix TEXT NOT NULL,
  created BIGINT NOT NULL,
  used BIGINT,
  revoked BIGINT
);
CREATE TABLE classifiers (
  id TEXT PRIMARY KEY,
  tenant TEXT NOT NULL REFERENCES tenants (id),
  name TEXT,
  language TEXT NOT NULL,
  created BIGINT NOT NULL,
  active BIGINT,
  serial BIGINT NOT NULL UNIQUE
);
CREATE INDEX classifiers_of_tenant ON classifiers (tenant);
CREATE TABLE versions (
  classifier TEXT NOT NULL REFERENCES classifiers (id) ON DELETE CASCADE,
  number BIGINT NOT NULL,
  rows BIGINT NOT NULL,
  classes BIGINT NOT NULL,
  sha256 TEXT NOT NULL,
  created BIGINT NOT NULL,
  bytes BIGINT NOT NULL,
  report DOUBLE PRECISION,
  PRIMARY KEY (classifier, number)
);
CREATE TABLE jobs (
  id TEXT PRIMARY KEY,
  classifier TEXT NOT NULL REFERENCES classifiers (id) ON DELETE CASCADE,
  version BIGINT NOT NULL,
  tenant TEXT NOT NULL,
  state TEXT NOT NULL,
  queued BIGINT NOT NULL,
  started BIGINT,
  finished BIGINT,
  owner TEXT,
  attempt BIGINT NOT NULL DEFAULT 0,
  attempt_started BIGINT,
  lease_until BIGINT,
  cancel BIGINT NOT NULL DEFAULT 0,
  epoch BIGINT NOT NULL DEFAULT 0,
  epochs BIGINT NOT NULL DEFAULT 0,
  updates BIGINT NOT NULL DEFAULT 0,
  total BIGINT NOT NULL DEFAULT 0,
  best_update BIGINT NOT NULL DEFAULT 0,
  resumed_from BIGINT NOT NULL DEFAULT -1,
  fruitless BIGINT NOT NULL DEFAULT 0,
  samples_s DOUBLE PRECISION NOT NULL DEFAULT 0,
  error TEXT
);
CREATE INDEX jobs_by_state ON jobs (state, queued);
CREATE INDEX jobs_of_classifier ON jobs (classifier, queued);
CREATE TABLE epochs (
  job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  epoch BIGINT NOT NULL,
  at BIGINT NOT NULL,
  loss DOUBLE PRECISION,
  accuracy DOUBLE PRECISION,
  held_accuracy DOUBLE PRECISION,
  PRIMARY KEY (job, epoch)
);
CREATE TABLE idempotency (
  tenant TEXT NOT NULL,
  key TEXT NOT NULL,
  sha256 TEXT NOT NULL,
  classifier TEXT NOT NULL REFERENCES classifiers (id) ON DELETE CASCADE,
  at BIGINT NOT NULL,
  PRIMARY KEY (tenant, key)
);
CREATE TABLE purges (
  path TEXT PRIMARY KEY,
  at BIGINT NOT NULL
);
