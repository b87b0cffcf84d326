-- The results of one run of vdkit's lab. Times of day are seconds since 1970-01-01 UTC; lists and
-- axes are JSON. `results`, `cells` and `places` are for people and other tools.
CREATE TABLE run (
  id TEXT PRIMARY KEY,
  plan TEXT NOT NULL,             -- JSON: name, title, question, axes, metric, baseline
  quick INTEGER NOT NULL,
  seed TEXT NOT NULL,             -- a number of 64 bits without sign, in decimal
  started INTEGER NOT NULL,
  ended INTEGER,
  vdkit_version TEXT NOT NULL,
  environment TEXT NOT NULL,      -- JSON without its sections
  request TEXT NOT NULL           -- JSON: what the run needs to go on after an interruption
) STRICT;
CREATE TABLE environment (
  position INTEGER PRIMARY KEY, section TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL
) STRICT;
CREATE TABLE cell (
  id INTEGER PRIMARY KEY,         -- in the order of the plan
  key TEXT NOT NULL UNIQUE,
  axes TEXT NOT NULL,
  commands TEXT NOT NULL,
  notes TEXT NOT NULL,
  outcome TEXT NOT NULL,          -- pending, measured, skipped, failed
  reason TEXT
) STRICT;
CREATE TABLE axis (
  cell INTEGER NOT NULL REFERENCES cell, name TEXT NOT NULL, value TEXT NOT NULL,
  PRIMARY KEY (cell, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE sample (
  id INTEGER PRIMARY KEY,
  cell INTEGER NOT NULL REFERENCES cell,
  round INTEGER NOT NULL,
  started INTEGER NOT NULL,
  seconds REAL NOT NULL,
  steady TEXT,                    -- JSON
  raw TEXT,                       -- fio's own JSON
  UNIQUE (cell, round)
) STRICT;
CREATE TABLE value (
  sample INTEGER NOT NULL REFERENCES sample, metric TEXT NOT NULL, value REAL NOT NULL,
  PRIMARY KEY (sample, metric)
) STRICT, WITHOUT ROWID;
CREATE TABLE latency (
  sample INTEGER NOT NULL REFERENCES sample, nanoseconds INTEGER NOT NULL, count INTEGER NOT NULL,
  PRIMARY KEY (sample, nanoseconds)
) STRICT, WITHOUT ROWID;
CREATE TABLE series (
  sample INTEGER NOT NULL REFERENCES sample, metric TEXT NOT NULL, position INTEGER NOT NULL,
  second REAL NOT NULL, value REAL NOT NULL,
  PRIMARY KEY (sample, metric, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE published (
  position INTEGER PRIMARY KEY, axes TEXT NOT NULL, metric TEXT NOT NULL, value REAL NOT NULL,
  source TEXT NOT NULL
) STRICT;
CREATE TABLE warning (
  position INTEGER PRIMARY KEY, kind TEXT NOT NULL, text TEXT NOT NULL, cells TEXT NOT NULL
) STRICT;
-- Folders that a run has made and not yet removed.
CREATE TABLE scratch (path TEXT PRIMARY KEY) STRICT;

CREATE VIEW results AS
  SELECT cell.key AS cell, sample.round, value.metric, value.value
  FROM value JOIN sample ON sample.id = value.sample JOIN cell ON cell.id = sample.cell
  ORDER BY cell.id, sample.round, value.metric;
CREATE VIEW cells AS
  SELECT cell.key AS cell, outcome, reason, count(sample.id) AS rounds
  FROM cell LEFT JOIN sample ON sample.cell = cell.id GROUP BY cell.id ORDER BY cell.id;
CREATE VIEW places AS
  SELECT json_extract(place.value, '$.name') AS name, json_extract(place.value, '$.path') AS path,
         json_extract(place.value, '$.file-system') AS file_system,
         json_extract(place.value, '$.device') AS device
  FROM run, json_each(run.environment, '$.places') AS place;
