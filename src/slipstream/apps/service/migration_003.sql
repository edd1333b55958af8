-- When a job of the tenant last began. The tenant that began last comes last, also if it deletes
-- that job.
ALTER TABLE tenants ADD COLUMN last_start BIGINT NOT NULL DEFAULT 0;
UPDATE tenants SET last_start =
  COALESCE((SELECT MAX(j.started) FROM jobs j WHERE j.tenant = tenants.id), 0);
