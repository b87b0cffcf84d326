//! Reads a run from its file.

use crate::error::{Context, Result, bail};
use rusqlite::{Connection, Row};
use serde::de::DeserializeOwned;

use crate::model::{
    Cell, Environment, Histogram, Outcome, Published, Run, Sample, Section, Series, Warning,
};

use super::Store;

fn parse<T: DeserializeOwned>(text: &str, what: &str) -> Result<T> {
    serde_json::from_str(text).with_context(|| format!("the run's {what} cannot be read"))
}

fn rows<T>(
    connection: &Connection,
    sql: &str,
    parameters: impl rusqlite::Params,
    mut read: impl FnMut(&Row<'_>) -> Result<T>,
) -> Result<Vec<T>> {
    let mut query = connection.prepare_cached(sql)?;
    let mut found = query.query(parameters)?;
    let mut all = Vec::new();
    while let Some(row) = found.next()? {
        all.push(read(row)?);
    }
    Ok(all)
}

impl Store {
    /// The whole run as it is now.
    pub fn run(&self) -> Result<Run> {
        self.whole().with_context(|| self.path.display().to_string())
    }

    fn whole(&self) -> Result<Run> {
        let heads = rows(
            &self.connection,
            "SELECT id, plan, quick, seed, started, ended, vdkit_version, environment FROM run",
            [],
            |row| {
                Ok(Run {
                    id: row.get(0)?,
                    plan: parse(&row.get::<_, String>(1)?, "plan")?,
                    quick: row.get(2)?,
                    seed: row.get::<_, String>(3)?.parse()?,
                    started: row.get::<_, i64>(4)? as u64,
                    ended: row.get::<_, Option<i64>>(5)?.map(|seconds| seconds as u64),
                    vdkit_version: row.get(6)?,
                    environment: parse(&row.get::<_, String>(7)?, "environment")?,
                    ..Run::default()
                })
            },
        )?;
        let Some(mut run) = heads.into_iter().next() else { bail!("the file contains no run") };
        self.sections(&mut run.environment)?;
        run.cells = self.cells()?;
        run.published = self.published()?;
        run.warnings =
            rows(&self.connection, "SELECT kind, text, cells FROM warning", [], |row| {
                Ok(Warning {
                    kind: row.get(0)?,
                    text: row.get(1)?,
                    cells: parse(&row.get::<_, String>(2)?, "warnings")?,
                })
            })?;
        Ok(run)
    }

    /// The request of the run; see [`Store::create`].
    pub fn request<T: DeserializeOwned>(&self) -> Result<T> {
        let text: String =
            self.connection.query_row("SELECT request FROM run", [], |row| row.get(0))?;
        parse(&text, "request")
    }

    fn sections(&self, environment: &mut Environment) -> Result<()> {
        let sql = "SELECT section, name, value FROM environment ORDER BY position";
        let entries = rows(&self.connection, sql, [], |row| {
            Ok((row.get::<_, String>(0)?, (row.get(1)?, row.get(2)?)))
        })?;
        for (title, entry) in entries {
            match environment.sections.last_mut() {
                Some(section) if section.title == title => section.entries.push(entry),
                _ => environment.sections.push(Section { title, entries: vec![entry] }),
            }
        }
        Ok(())
    }

    fn published(&self) -> Result<Vec<Published>> {
        let sql = "SELECT axes, metric, value, source FROM published ORDER BY position";
        rows(&self.connection, sql, [], |row| {
            Ok(Published {
                axes: parse(&row.get::<_, String>(0)?, "published numbers")?,
                metric: row.get(1)?,
                value: row.get(2)?,
                source: row.get(3)?,
            })
        })
    }

    fn cells(&self) -> Result<Vec<Cell>> {
        let sql = "SELECT id, key, axes, commands, notes, outcome, reason FROM cell ORDER BY id";
        rows(&self.connection, sql, [], |row| {
            let reason = row.get::<_, Option<String>>(6)?.unwrap_or_default();
            let outcome = match row.get::<_, String>(5)?.as_str() {
                "pending" => Outcome::Pending,
                "measured" => Outcome::Measured,
                "skipped" => Outcome::Skipped(reason),
                "failed" => Outcome::Failed(reason),
                other => bail!("a cell's outcome is '{other}'"),
            };
            Ok(Cell {
                key: row.get(1)?,
                axes: parse(&row.get::<_, String>(2)?, "cells")?,
                commands: parse(&row.get::<_, String>(3)?, "cells")?,
                notes: parse(&row.get::<_, String>(4)?, "cells")?,
                samples: self.samples(row.get(0)?)?,
                outcome,
            })
        })
    }

    fn samples(&self, cell: i64) -> Result<Vec<Sample>> {
        let sql = "SELECT id, round, started, seconds, steady, raw FROM sample
                   WHERE cell = ? ORDER BY round";
        rows(&self.connection, sql, [cell], |row| {
            let id: i64 = row.get(0)?;
            let text = |column| row.get::<_, Option<String>>(column);
            Ok(Sample {
                round: row.get(1)?,
                started: row.get::<_, i64>(2)? as u64,
                seconds: row.get(3)?,
                steady: text(4)?.map(|text| parse(&text, "samples")).transpose()?,
                raw: text(5)?.map(|text| parse(&text, "samples")).transpose()?,
                values: self.values(id)?.into_iter().collect(),
                latencies: self.latencies(id)?,
                series: self.series(id)?,
            })
        })
    }

    fn values(&self, sample: i64) -> Result<Vec<(String, f64)>> {
        let sql = "SELECT metric, value FROM value WHERE sample = ?";
        rows(&self.connection, sql, [sample], |row| Ok((row.get(0)?, row.get(1)?)))
    }

    fn latencies(&self, sample: i64) -> Result<Option<Histogram>> {
        let sql = "SELECT nanoseconds, count FROM latency WHERE sample = ? ORDER BY nanoseconds";
        let buckets = rows(&self.connection, sql, [sample], |row| {
            Ok((row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u64))
        })?;
        Ok((!buckets.is_empty()).then_some(Histogram { buckets }))
    }

    fn series(&self, sample: i64) -> Result<Vec<Series>> {
        let sql = "SELECT metric, second, value FROM series WHERE sample = ?
                   ORDER BY metric, position";
        let points = rows(&self.connection, sql, [sample], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, f64>(1)?, row.get::<_, f64>(2)?))
        })?;
        let mut all: Vec<Series> = Vec::new();
        for (metric, second, value) in points {
            if all.last().is_none_or(|series| series.metric != metric) {
                all.push(Series { metric, ..Series::default() });
            }
            if let Some(series) = all.last_mut() {
                series.seconds.push(second);
                series.values.push(value);
            }
        }
        Ok(all)
    }
}
