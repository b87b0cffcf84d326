//! Control socket of a service: JSON lines over a Unix socket, one object per command and answer.
//!
//! ```text
//! → {"command":"status"}
//! ← {"ok":true,"answer":{…}}
//! → {"command":"snapshot","name":"before-update"}
//! ← {"ok":false,"error":"…"}
//! ```
//!
//! Anyone who can open the socket controls the service, so its mode is 0600.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vdkit_block::{
    Bitmaps, CancelToken, Error, Monitor, NewBitmap, NewSnapshot, Remedy, SnapshotInfo,
};

use crate::bitmaps::BitmapList;
use crate::counters::Stats;
use crate::export::Export;
use crate::images::{Committed, ImageChain, Images};
use crate::job::JobStatus;
use crate::metrics;
use crate::parking::ParkedInfo;
use crate::socket::{Access, UnixSocket, Worker};

/// Maximum length of a line.
const LINE_MAX: u64 = 64 << 10;
/// Idle time after which a client is disconnected.
const IDLE: Duration = Duration::from_secs(60);
/// Maximum time to wait for a client that does not read its answer.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Interval at which the end of a control socket looks whether the commands have ended.
const END_POLL: Duration = Duration::from_millis(10);

/// A command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Command {
    /// What is served, and its state.
    Status,
    /// The counters.
    Stats,
    /// Flushes the disk.
    Flush,
    /// Blocks all requests.
    Pause,
    /// Unblocks requests, and retries at once those that wait for space.
    Resume,
    /// Takes an internal snapshot.
    Snapshot {
        /// Its name.
        name: String,
    },
    /// Deletes a snapshot.
    SnapshotDelete {
        /// Its name or id.
        name: String,
    },
    /// Lists the image's dirty bitmaps.
    BitmapList,
    /// Adds an empty bitmap, which later clients may read.
    BitmapAdd {
        /// Its name.
        name: String,
        /// Bytes per bit; `None` for the format's default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        granularity: Option<u64>,
        /// Do not record yet.
        #[serde(default)]
        disabled: bool,
    },
    /// Removes a bitmap.
    BitmapRemove {
        /// Its name.
        name: String,
    },
    /// Clears a bitmap.
    BitmapClear {
        /// Its name.
        name: String,
    },
    /// Starts recording.
    BitmapEnable {
        /// Its name.
        name: String,
    },
    /// Stops recording.
    BitmapDisable {
        /// Its name.
        name: String,
    },
    /// Merges one bitmap into another.
    BitmapMerge {
        /// Name of the source.
        source: String,
        /// Name of the target.
        into: String,
    },
    /// Puts a new overlay on the image and continues with it.
    SnapshotExternal {
        /// An absolute path, since relative ones start at the service's folder.
        overlay: PathBuf,
    },
    /// Commits the image to its backing image and continues with that one.
    Commit {
        /// Also if dependent images or snapshots would be damaged.
        #[serde(default)]
        force: bool,
    },
    /// Cancels a commit; the disk is then unchanged.
    CommitCancel,
    /// Grows the disk.
    Resize {
        /// Bytes.
        size: u64,
    },
    /// The counters in Prometheus' format.
    Metrics,
    /// Ends the service.
    Quit,
}

/// What is served, and its state.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    /// The image and its backing chain.
    #[serde(flatten)]
    pub images: ImageChain,
    /// The export's name.
    pub name: String,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether all requests are blocked.
    pub paused: bool,
    /// Changes waiting for space.
    pub parked: ParkedInfo,
    /// The running job and its progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<JobStatus>,
    /// Seconds since the service started.
    pub uptime_seconds: f64,
}

/// Answer to a command.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Answer {
    /// To `status`.
    Status(Status),
    /// To `stats`.
    Stats(Stats),
    /// To `snapshot` and `snapshot-delete`.
    Snapshot(SnapshotInfo),
    /// To all commands about bitmaps.
    Bitmaps(BitmapList),
    /// To `snapshot-external`.
    Chain(ImageChain),
    /// To `commit`.
    Committed(Committed),
    /// To `metrics`.
    Text(String),
    /// To all other commands.
    Done {},
}

/// Runs commands on an export.
#[derive(Clone, Debug)]
pub struct Controller {
    export: Arc<Export>,
    began: Instant,
    quit: CancelToken,
    images: Option<Arc<dyn Images>>,
}

impl Controller {
    /// A controller of this export; `quit` is cancelled when a client asks to end the service.
    pub fn new(export: Arc<Export>, quit: CancelToken) -> Self {
        Self { export, began: Instant::now(), quit, images: None }
    }

    /// Adds the handler of commands that change the image chain.
    pub fn with_images(self, images: Arc<dyn Images>) -> Self {
        Self { images: Some(images), ..self }
    }

    fn images(&self) -> vdkit_block::Result<&dyn Images> {
        self.images.as_deref().ok_or_else(|| {
            let hint = "end it first, and change the image then";
            Error::unsupported(
                &self.export.filename(),
                "this server keeps the image that it was started with",
                hint,
            )
        })
    }

    /// Runs one command. [`Command::Quit`] is only acknowledged here: `quit` is cancelled after the
    /// answer was sent.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn run(&self, command: &Command) -> vdkit_block::Result<Answer> {
        let export = &self.export;
        let bitmaps = |act: &dyn Fn(&dyn Bitmaps) -> vdkit_block::Result<()>| {
            export.change_bitmaps(act).map(Answer::Bitmaps)
        };
        match command {
            Command::Status => Ok(Answer::Status(self.status())),
            Command::Stats => Ok(Answer::Stats(export.stats())),
            Command::Flush => export.flush_despite_pause().map(|()| Answer::Done {}),
            Command::Pause => {
                export.pause();
                Ok(Answer::Done {})
            }
            Command::Resume => {
                export.resume();
                Ok(Answer::Done {})
            }
            Command::Snapshot { name } => {
                let new = NewSnapshot::now(name);
                export.with_snapshots(|side| side.create(&new, &Monitor::default()))
            }
            Command::SnapshotDelete { name } => {
                export.with_snapshots(|side| side.delete(name, &Monitor::default()))
            }
            Command::BitmapList => export.list_bitmaps().map(Answer::Bitmaps),
            Command::BitmapAdd { name, granularity, disabled } => {
                let new = NewBitmap { name, granularity: *granularity, enabled: !disabled };
                let list = export.change_bitmaps(|all| all.add(&new))?;
                export.offer_bitmap(name);
                Ok(Answer::Bitmaps(list))
            }
            Command::BitmapRemove { name } => bitmaps(&|all| all.remove(name)),
            Command::BitmapClear { name } => bitmaps(&|all| all.clear(name)),
            Command::BitmapEnable { name } => bitmaps(&|all| all.set_enabled(name, true)),
            Command::BitmapDisable { name } => bitmaps(&|all| all.set_enabled(name, false)),
            Command::BitmapMerge { source, into } => bitmaps(&|all| all.merge(into, all, source)),
            Command::SnapshotExternal { overlay } => {
                self.images()?.snapshot_external(export, overlay).map(Answer::Chain)
            }
            Command::Commit { force } => {
                self.images()?.commit(export, *force).map(Answer::Committed)
            }
            Command::CommitCancel => export.cancel_job("commit").map(|()| Answer::Done {}),
            Command::Resize { size } => export.grow(*size).map(|()| Answer::Done {}),
            Command::Metrics => Ok(Answer::Text(metrics::text(export))),
            // The answer comes first: see `converse`.
            Command::Quit => Ok(Answer::Done {}),
        }
    }

    fn status(&self) -> Status {
        let export = &self.export;
        Status {
            images: export.chain(),
            name: export.name().to_owned(),
            virtual_size: export.size(),
            read_only: export.read_only(),
            paused: export.paused(),
            parked: export.parked(),
            job: export.job(),
            uptime_seconds: self.began.elapsed().as_secs_f64(),
        }
    }
}

#[derive(Serialize)]
struct Reply<'a> {
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<&'a Answer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a String>,
}

/// A control socket, open until dropped. Dropping it ends its connections: running commands are
/// answered, and on return no thread of the control holds the export. Any job of the export that runs
/// while a command still does is cancelled. In a child of `fork`, dropping it ends nothing.
#[derive(Debug)]
#[must_use = "dropping it closes the socket"]
pub struct Control {
    _worker: Worker,
}

impl Control {
    /// Listens; see [`UnixSocket::bind`].
    ///
    /// # Errors
    /// Errors of the system.
    pub fn start(path: &Path, controller: Controller) -> io::Result<Self> {
        let socket = UnixSocket::bind(path, Access::Owner)?;
        // A connection may close between poll and accept.
        socket.set_nonblocking(true)?;
        let worker = Worker::start("control", move |woken| {
            let mut conversations = Conversations::default();
            // A client that stays connected must not block others.
            while let Some((client, _)) = woken.accept("control", &socket, || socket.accept()) {
                conversations.start(client, controller.clone());
            }
            drop(socket);
            conversations.end(&controller.export);
        })?;
        Ok(Self { _worker: worker })
    }
}

/// The connections, and the threads that serve them.
#[derive(Default)]
struct Conversations {
    /// Only the thread holds the socket, so that it is closed when the thread ends.
    running: Vec<(Weak<UnixStream>, JoinHandle<()>)>,
    /// No further command is run.
    ended: CancelToken,
}

impl Conversations {
    fn start(&mut self, client: UnixStream, controller: Controller) {
        self.running.retain(|(_, thread)| !thread.is_finished());
        let client = Arc::new(client);
        let (weak, ended) = (Arc::downgrade(&client), self.ended.clone());
        let spawned = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || converse(&client, &controller, &ended));
        match spawned {
            Ok(thread) => self.running.push((weak, thread)),
            Err(error) => tracing::warn!("control: cannot start a thread for a client: {error}"),
        }
    }

    /// Runs no further command, and waits for those that run.
    fn end(self, export: &Export) {
        self.ended.cancel();
        for client in self.running.iter().filter_map(|(client, _)| client.upgrade()) {
            // The answer to a running command can still be sent.
            let _ = client.shutdown(Shutdown::Read);
        }
        for (_, thread) in self.running {
            while !thread.is_finished() {
                // Repeatedly: a command may have begun, and its job not yet.
                export.cancel_any_job();
                std::thread::sleep(END_POLL);
            }
            let _ = thread.join();
        }
    }
}

/// An error with what can be done about it, in the words of `vdkit ctl`.
fn words(error: &Error) -> String {
    match error.remedy() {
        Some(Remedy::Force { instead, when }) => {
            format!("{error}; {instead}; if {when}, repeat with --force")
        }
        _ => error.to_string(),
    }
}

/// Answers one client's lines until it disconnects or the control ends.
fn converse(client: &UnixStream, controller: &Controller, ended: &CancelToken) {
    let limited = client
        .set_read_timeout(Some(IDLE))
        .and_then(|()| client.set_write_timeout(Some(ANSWER_TIME)));
    if limited.is_err() {
        return;
    }
    let mut lines = BufReader::new(client);
    let mut out = client;
    loop {
        let mut line = Vec::new();
        match (&mut lines).take(LINE_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            // Lines that were received before the end of the control are still in the buffers.
            Ok(_) if ended.is_cancelled() => return,
            Ok(_) => {}
        }
        let command = serde_json::from_slice::<Command>(&line);
        let quit = matches!(command, Ok(Command::Quit));
        let done = match command {
            Ok(command) => controller.run(&command).map_err(|error| words(&error)),
            Err(error) => Err(format!("not a command: {error}")),
        };
        let (ok, answer, error) = (done.is_ok(), done.as_ref().ok(), done.as_ref().err());
        let reply = Reply { ok, answer, error };
        let Ok(mut bytes) = serde_json::to_vec(&reply) else { return };
        bytes.push(b'\n');
        let answered = out.write_all(&bytes);
        if quit {
            // Only after the answer: ending the process would lose it.
            controller.quit.cancel();
        }
        if answered.is_err() || line.last() != Some(&b'\n') {
            return;
        }
    }
}

/// Sends a command to a service and waits for the answer.
///
/// # Errors
/// Errors of the socket; `Other` with the service's message if it refuses.
pub fn ask(path: &Path, command: &Command) -> io::Result<serde_json::Value> {
    let socket = UnixStream::connect(path)?;
    let mut line = serde_json::to_vec(command)?;
    line.push(b'\n');
    (&socket).write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(&socket).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut reply: serde_json::Value = serde_json::from_str(&answer)?;
    if reply["ok"] == serde_json::Value::Bool(true) {
        return Ok(reply["answer"].take());
    }
    Err(io::Error::other(reply["error"].as_str().unwrap_or("no reason given").to_owned()))
}
