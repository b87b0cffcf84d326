//! Control of a service from outside: one JSON object a line over a Unix socket, and one back.
//!
//! ```text
//! → {"command":"status"}
//! ← {"ok":true,"answer":{…}}
//! → {"command":"snapshot","name":"before-update"}
//! ← {"ok":false,"error":"…"}
//! ```
//!
//! Whoever can open the socket commands the service: it is made for its owner alone (mode 0600).

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use vdkit_block::{Bitmaps, CancelToken, Error, Monitor, NewBitmap, NewSnapshot, SnapshotInfo};

use crate::bitmaps::BitmapList;
use crate::counters::Stats;
use crate::export::Export;
use crate::images::{Committed, ImageChain, Images};
use crate::job::JobStatus;
use crate::metrics;
use crate::parking::ParkedInfo;
use crate::socket::{ACCEPT_PAUSE, Access, UnixSocket, Wake};

/// The longest line that is listened to.
const LINE_MAX: u64 = 64 << 10;
/// A client that says nothing for so long has gone.
const IDLE: Duration = Duration::from_secs(60);

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// What is served, and how it is.
    Status,
    /// The counts.
    Stats,
    /// Makes durable what clients were answered.
    Flush,
    /// Keeps all requests waiting.
    Pause,
    /// Lets them go on, and tries again at once what waits for space.
    Resume,
    /// Takes a snapshot inside the image.
    Snapshot {
        /// Its name.
        name: String,
    },
    /// Removes a snapshot.
    SnapshotDelete {
        /// Its name or id.
        name: String,
    },
    /// Tells the image's dirty bitmaps.
    BitmapList,
    /// Adds one without marks, which clients that come afterwards may read.
    BitmapAdd {
        /// Its name.
        name: String,
        /// Bytes that a mark stands for; nothing for the format's choice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        granularity: Option<u64>,
        /// It does not record yet.
        #[serde(default)]
        disabled: bool,
    },
    /// Removes one.
    BitmapRemove {
        /// Its name.
        name: String,
    },
    /// Removes a bitmap's marks.
    BitmapClear {
        /// Its name.
        name: String,
    },
    /// Lets a bitmap record from now on.
    BitmapEnable {
        /// Its name.
        name: String,
    },
    /// Lets a bitmap record no more.
    BitmapDisable {
        /// Its name.
        name: String,
    },
    /// Sets the marks of one bitmap in another one too.
    BitmapMerge {
        /// The name of the one that is read.
        source: String,
        /// The name of the one that is changed.
        into: String,
    },
    /// Puts a new overlay on the image and goes on with it.
    SnapshotExternal {
        /// Where it shall be: an absolute path, as a relative one starts at the service's folder.
        overlay: PathBuf,
    },
    /// Moves what the image holds into the one beneath it, and goes on with that one.
    Commit {
        /// Also where other images or snapshots would be damaged.
        #[serde(default)]
        force: bool,
    },
    /// Stops a commit; the disk is as before it then.
    CommitCancel,
    /// Makes the disk larger.
    Resize {
        /// Bytes.
        size: u64,
    },
    /// The counts as Prometheus reads them.
    Metrics,
    /// Ends the service.
    Quit,
}

/// What is served, and how it is.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    /// What it is made of: the image, and what that stands on.
    #[serde(flatten)]
    pub images: ImageChain,
    /// The export's name.
    pub name: String,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether all requests are kept waiting.
    pub paused: bool,
    /// Changes that wait for space.
    pub parked: ParkedInfo,
    /// What exchanges images now, and how far it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<JobStatus>,
    /// Seconds since the service began.
    pub uptime_seconds: f64,
}

/// What a command answers.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
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
    /// To everything else.
    Done {},
}

/// Does commands on an export.
#[derive(Clone, Debug)]
pub struct Controller {
    export: Arc<Export>,
    began: Instant,
    quit: CancelToken,
    images: Option<Arc<dyn Images>>,
}

impl Controller {
    /// For this export; `quit` is set when the end is asked for.
    pub fn new(export: Arc<Export>, quit: CancelToken) -> Self {
        Self { export, began: Instant::now(), quit, images: None }
    }

    /// This controller with one who exchanges images.
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

    /// Does one command. [`Command::Quit`] is only acknowledged: the end is asked for once the
    /// answer is on its way.
    ///
    /// # Errors
    /// What the disk returns.
    pub fn run(&self, command: &Command) -> vdkit_block::Result<Answer> {
        let export = &self.export;
        let bitmaps = |act: &dyn Fn(&dyn Bitmaps) -> vdkit_block::Result<()>| {
            export.change_bitmaps(act).map(Answer::Bitmaps)
        };
        match command {
            Command::Status => Ok(Answer::Status(self.status())),
            Command::Stats => Ok(Answer::Stats(export.stats())),
            Command::Flush => export.flush().map(|()| Answer::Done {}),
            Command::Pause => {
                export.pause();
                Ok(Answer::Done {})
            }
            Command::Resume => {
                export.resume();
                Ok(Answer::Done {})
            }
            Command::Snapshot { name } => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let now = now.unwrap_or_default();
                let new = NewSnapshot {
                    name: name.clone(),
                    date_seconds: now.as_secs() as u32,
                    date_nanoseconds: now.subsec_nanos(),
                };
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
            // Answered first: see `converse`.
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
    answer: Option<Answer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// A control socket, until it is dropped.
pub struct Control {
    path: PathBuf,
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Control {
    /// Listens; see [`UnixSocket::bind`].
    ///
    /// # Errors
    /// What the system says.
    pub fn start(path: &Path, controller: Controller) -> io::Result<Self> {
        let socket = UnixSocket::bind(path, Access::Owner)?;
        // A connection may be gone between poll and accept.
        socket.set_nonblocking(true)?;
        let wake = Arc::new(Wake::new()?);
        let woken = Arc::clone(&wake);
        let thread = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || accept(&socket, &woken, &controller))?;
        Ok(Self { path: path.to_owned(), wake, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.wake.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Answers all who come, until it is woken.
fn accept(socket: &UnixSocket, wake: &Wake, controller: &Controller) {
    loop {
        let came = match wake.wait_at(&**socket) {
            Ok(true) => socket.accept(),
            Ok(false) => return,
            Err(error) => Err(error),
        };
        let (client, controller) = match came {
            Ok((client, _)) => (client, controller.clone()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => {
                tracing::warn!("control: a connection was not accepted: {error}");
                // Whoever waits to be accepted still waits: without a pause this would spin.
                if !wake.pause(ACCEPT_PAUSE) {
                    return;
                }
                continue;
            }
        };
        // A client that stays connected must not keep others out.
        let _ = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || converse(&client, &controller));
    }
}

/// An error with what can be done about it.
fn words(error: &Error) -> String {
    match error {
        Error::Dependents { hint, .. } => format!("{error}; {hint}"),
        error => error.to_string(),
    }
}

/// Answers one client's lines until it leaves.
fn converse(client: &UnixStream, controller: &Controller) {
    if client.set_read_timeout(Some(IDLE)).is_err() {
        return;
    }
    let mut lines = BufReader::new(client);
    let mut out = client;
    loop {
        let mut line = Vec::new();
        match (&mut lines).take(LINE_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let command = serde_json::from_slice::<Command>(&line);
        let quit = matches!(command, Ok(Command::Quit));
        let done = match command {
            Ok(command) => controller.run(&command).map_err(|error| words(&error)),
            Err(error) => Err(format!("not a command: {error}")),
        };
        let reply = match &done {
            Ok(answer) => Reply { ok: true, answer: Some(answer.clone()), error: None },
            Err(error) => Reply { ok: false, answer: None, error: Some(error) },
        };
        let Ok(mut bytes) = serde_json::to_vec(&reply) else { return };
        bytes.push(b'\n');
        let answered = out.write_all(&bytes);
        if quit {
            // Only now: the end of the process would take the answer with it.
            controller.quit.cancel();
        }
        if answered.is_err() || line.last() != Some(&b'\n') {
            return;
        }
    }
}

/// Asks a service: sends a command and waits for the answer.
///
/// # Errors
/// What the socket says; `Other` with the service's own words where it says no.
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
