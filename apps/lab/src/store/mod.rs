//! Stores a run in one SQLite database, which other tools can read.
//!
//! The schema is in `schema.sql` in this folder. A sample is one transaction: after an
//! interruption, also a power failure, each round of a cell is there completely or not at all.
//! There is no write-ahead log, so the one file holds everything while no transaction is open.
//!
//! A measuring process holds the file exclusively, with the lock of an image that is written. The
//! kernel releases the lock however the process ends. The lock's bytes differ from SQLite's, and
//! readers do not take it.

mod read;

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result, bail};
use rusqlite::{Connection, ErrorCode, OpenFlags, params};
use serde::Serialize;
use vdkit_storage::{FileOptions, FileStorage};

use crate::model::{Cell, Environment, Run, Sample, Series, Warning};

/// Application id in the database's header: "vdkl".
const APPLICATION_ID: i32 = 0x7664_6b6c;
/// The version of the schema, as SQLite's `user_version`.
const VERSION: i32 = 1;

/// A run's file.
#[derive(Debug)]
pub struct Store {
    connection: Connection,
    path: PathBuf,
    /// Declared after the connection, because closing any descriptor of a file drops SQLite's locks
    /// on it.
    #[allow(dead_code, reason = "it is held, not looked at")]
    lock: Option<FileStorage>,
}

fn json(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(value)?)
}

/// Keeps other processes from measuring into the same file. None if its file system has no locks;
/// SQLite reports other problems of the file.
fn own(path: &Path) -> Result<Option<FileStorage>> {
    match FileStorage::open(path, &FileOptions::default().writable(true)) {
        Ok(lock) => Ok(Some(lock)),
        Err(error @ vdkit_block::Error::Locked { .. }) => Err(error.into()),
        Err(_) => Ok(None),
    }
}

impl Store {
    /// Creates a file for a run, with its cells and without samples. [`Store::request`] returns
    /// `request`.
    pub fn create(path: &Path, run: &Run, request: &impl Serialize) -> Result<Self> {
        if path.exists() {
            bail!("{}: already exists; name another file with --out", path.display());
        }
        File::create_new(path).with_context(|| path.display().to_string())?;
        let lock = own(path)?;
        let connection = Connection::open(path).with_context(|| path.display().to_string())?;
        let mut store = Self { connection, path: path.to_owned(), lock };
        let made = store.fill(run, request).with_context(|| path.display().to_string());
        if made.is_err() {
            // Remove the incomplete file.
            let _ = std::fs::remove_file(path);
        }
        made.map(|()| store)
    }

    fn fill(&mut self, run: &Run, request: &impl Serialize) -> Result<()> {
        self.connection.pragma_update(None, "journal_mode", "DELETE")?;
        self.connection.pragma_update(None, "application_id", APPLICATION_ID)?;
        let transaction = self.connection.transaction()?;
        transaction.execute_batch(include_str!("schema.sql"))?;
        transaction.execute(
            "INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?, '{}', ?)",
            params![
                run.id,
                json(&run.plan)?,
                run.quick,
                run.seed.to_string(),
                run.started as i64,
                run.ended.map(|seconds| seconds as i64),
                run.vdkit_version,
                json(request)?
            ],
        )?;
        for published in &run.published {
            transaction.execute(
                "INSERT INTO published (axes, metric, value, source) VALUES (?, ?, ?, ?)",
                params![
                    json(&published.axes)?,
                    published.metric,
                    published.value,
                    published.source
                ],
            )?;
        }
        for cell in &run.cells {
            let (outcome, reason) = cell.outcome.state();
            transaction.execute(
                "INSERT INTO cell (key, axes, commands, notes, outcome, reason)
                 VALUES (?, ?, ?, ?, ?, ?)",
                params![
                    cell.key,
                    json(&cell.axes)?,
                    json(&cell.commands)?,
                    json(&cell.notes)?,
                    outcome,
                    reason
                ],
            )?;
            let id = transaction.last_insert_rowid();
            for (name, value) in &cell.axes {
                transaction
                    .execute("INSERT INTO axis VALUES (?, ?, ?)", params![id, name, value])?;
            }
        }
        transaction.pragma_update(None, "user_version", VERSION)?;
        transaction.commit()?;
        self.set_environment(&run.environment)?;
        for warning in &run.warnings {
            self.add_warning(warning)?;
        }
        for cell in &run.cells {
            for sample in &cell.samples {
                self.add_sample(cell, sample)?;
            }
        }
        Ok(())
    }

    /// Opens a file to resume its run, exclusively.
    ///
    /// # Errors
    /// [`vdkit_block::Error::Locked`] if another process measures; the file is not a run, or is of
    /// a newer version.
    pub fn open(path: &Path) -> Result<Self> {
        // Taken before SQLite opens the file, and released after SQLite closes it: see the field.
        let lock = if path.is_file() { own(path)? } else { None };
        let store = Self::open_with(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        Ok(Self { lock, ..store })
    }

    /// Opens a file for reading only.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_read_only(path: &Path) -> Result<Self> {
        let open = || Self::open_with(path, OpenFlags::SQLITE_OPEN_READ_ONLY);
        let opened = open();
        let mut journal = path.as_os_str().to_owned();
        journal.push("-journal");
        if opened.is_ok() || !Path::new(&journal).exists() {
            return opened;
        }
        // A process ended while it saved. Only a connection that may write undoes that.
        match Self::open(path) {
            Ok(undone) => drop(undone),
            // It is still saving.
            Err(error) if matches!(error.engine(), Some(vdkit_block::Error::Locked { .. })) => {}
            Err(error) => {
                let name = path.display();
                return Err(error).context(format!(
                    "{name}: interrupted while results were saved; resume the run, or read the file as \
                     a user who may write to it and its folder"
                ));
            }
        }
        open()
    }

    fn open_with(path: &Path, flags: OpenFlags) -> Result<Self> {
        let name = path.display();
        if !path.is_file() {
            bail!("{name}: no such file; 'vdkit lab run' makes one");
        }
        let flags = flags | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection =
            Connection::open_with_flags(path, flags).with_context(|| name.to_string())?;
        let pragma = |key| connection.pragma_query_value(None, key, |row| row.get::<_, i32>(0));
        let application = match pragma("application_id") {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
                bail!("{name}: not a result of 'vdkit lab run': not a SQLite database")
            }
            found => found.with_context(|| name.to_string())?,
        };
        if application != APPLICATION_ID {
            bail!(
                "{name}: not a result of 'vdkit lab run': application id {application:#x}, \
                 expected {APPLICATION_ID:#x}"
            );
        }
        match pragma("user_version")? {
            VERSION => Ok(Self { connection, path: path.to_owned(), lock: None }),
            0 => bail!("{name}: the run was interrupted before it began; start a new run"),
            other => bail!(
                "{name}: results of version {other}, this vdkit reads version {VERSION}; use the \
                 vdkit that made them"
            ),
        }
    }

    /// Loads the run of a file.
    ///
    /// # Errors
    /// As [`Store::open`], or the content is damaged.
    pub fn load(path: &Path) -> Result<Run> {
        Self::open_read_only(path)?.run()
    }

    /// Stores the description of the machine. A resumed run replaces the earlier description.
    pub fn set_environment(&mut self, environment: &Environment) -> Result<()> {
        let core = Environment { sections: Vec::new(), ..environment.clone() };
        let transaction = self.connection.transaction()?;
        transaction.execute("UPDATE run SET environment = ?", params![json(&core)?])?;
        transaction.execute("DELETE FROM environment", [])?;
        for section in &environment.sections {
            for (name, value) in &section.entries {
                transaction.execute(
                    "INSERT INTO environment (section, name, value) VALUES (?, ?, ?)",
                    params![section.title, name, value],
                )?;
            }
        }
        Ok(transaction.commit()?)
    }

    /// Adds a round of a cell, and updates the cell's commands and notes.
    pub fn add_sample(&mut self, cell: &Cell, sample: &Sample) -> Result<()> {
        let transaction = self.connection.transaction()?;
        let id: i64 =
            transaction
                .query_row("SELECT id FROM cell WHERE key = ?", [&cell.key], |r| r.get(0))?;
        transaction.execute(
            "UPDATE cell SET commands = ?, notes = ? WHERE id = ?",
            params![json(&cell.commands)?, json(&cell.notes)?, id],
        )?;
        transaction.execute(
            "INSERT INTO sample (cell, round, started, seconds, steady, raw)
             VALUES (?, ?, ?, ?, ?, ?)",
            params![
                id,
                sample.round,
                sample.started as i64,
                sample.seconds,
                sample.steady.as_ref().map(json).transpose()?,
                sample.raw.as_ref().map(json).transpose()?
            ],
        )?;
        let id = transaction.last_insert_rowid();
        // SQLite cannot store NaN, which carries no information anyway.
        for (metric, value) in sample.values.iter().filter(|(_, value)| value.is_finite()) {
            transaction
                .execute("INSERT INTO value VALUES (?, ?, ?)", params![id, metric, value])?;
        }
        if let Some(latencies) = &sample.latencies {
            let mut insert = transaction.prepare("INSERT INTO latency VALUES (?, ?, ?)")?;
            for (ns, count) in &latencies.buckets {
                insert.execute(params![id, *ns as i64, *count as i64])?;
            }
        }
        for series in &sample.series {
            add_series(&transaction, id, series)?;
        }
        Ok(transaction.commit()?)
    }

    /// Stores the outcome of a cell.
    pub fn set_outcome(&mut self, cell: &Cell) -> Result<()> {
        let (outcome, reason) = cell.outcome.state();
        self.connection.execute(
            "UPDATE cell SET outcome = ?, reason = ?, commands = ?, notes = ? WHERE key = ?",
            params![outcome, reason, json(&cell.commands)?, json(&cell.notes)?, cell.key],
        )?;
        Ok(())
    }

    /// Adds a warning.
    pub fn add_warning(&mut self, warning: &Warning) -> Result<()> {
        self.connection.execute(
            "INSERT INTO warning (kind, text, cells) VALUES (?, ?, ?)",
            params![warning.kind, warning.text, json(&warning.cells)?],
        )?;
        Ok(())
    }

    /// Marks the run as complete.
    pub fn end(&mut self, when: u64) -> Result<()> {
        self.connection.execute("UPDATE run SET ended = ?", params![when as i64])?;
        Ok(())
    }

    /// Records a folder that must be removed, by this process or a later one.
    pub fn add_scratch(&mut self, folder: &Path) -> Result<()> {
        let name = folder.to_str().context("a scratch folder whose name is not UTF-8")?;
        self.connection.execute("INSERT OR IGNORE INTO scratch VALUES (?)", [name])?;
        Ok(())
    }

    /// Folders that an earlier process left behind.
    pub fn scratch(&self) -> Result<Vec<PathBuf>> {
        let mut query = self.connection.prepare("SELECT path FROM scratch")?;
        let rows = query.query_map([], |row| row.get::<_, String>(0))?;
        Ok(rows.map(|row| row.map(PathBuf::from)).collect::<rusqlite::Result<_>>()?)
    }

    /// Records that a folder was removed.
    pub fn forget_scratch(&mut self, folder: &Path) -> Result<()> {
        let name = folder.to_str().context("a scratch folder whose name is not UTF-8")?;
        self.connection.execute("DELETE FROM scratch WHERE path = ?", [name])?;
        Ok(())
    }
}

fn add_series(transaction: &Connection, sample: i64, series: &Series) -> Result<()> {
    let mut insert = transaction.prepare("INSERT INTO series VALUES (?, ?, ?, ?, ?)")?;
    let points = series.seconds.iter().zip(&series.values);
    for (i, (second, value)) in points.enumerate() {
        insert.execute(params![sample, series.metric, i as i64, second, value])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
