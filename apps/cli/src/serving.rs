//! Options and helpers shared by the commands that serve a disk.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use vdkit::serve::{Export, OnNoSpace, Scrape, ScrapeAddress};
use vdkit::{CancelToken, Disk, OpenOptions};

use crate::arguments::{CacheOption, Force, References, SnapshotOption, one_of, size};
use crate::failure::{Failure, Tone, print_line, say};
use crate::guard;
use crate::keys::Keys;
use crate::session::Session;

/// How long the last requests of clients may take at shutdown.
pub const DRAIN: Duration = Duration::from_secs(30);

/// Hint for an image that has overlays.
const SERVED_BENEATH: &str = "make an overlay of it for the clients ('vdkit create NEW --backing \
                              IMAGE'), or let nobody write ('--read-only'); if the others are not \
                              needed any more, repeat with --force";

/// Interval between two checks for the end.
const POLL: Duration = Duration::from_millis(50);

/// Waits until a signal or `ctl quit` asks for the end, or `over` says that nobody is left to
/// serve. Reports when writes begin to wait for space, and when they continue.
pub fn wait(export: &Export, stop: &CancelToken, over: impl Fn() -> bool) {
    let mut full = false;
    while !stop.is_cancelled() && !over() {
        std::thread::sleep(POLL);
        let parked = export.parked();
        if full == (parked.requests > 0) {
            continue;
        }
        full = !full;
        if full {
            print_line(Tone::Warning, &format!("writes wait for space: {}", parked.reason));
        } else {
            say("there is space again: writes go on");
        }
    }
}

/// Options for opening the served image.
#[derive(Args, Clone, Debug)]
pub struct ServedDisk {
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    #[command(flatten)]
    snapshot: SnapshotOption,
    /// Reaction to a full file system: pause (writes wait for space) or report (writes fail)
    #[arg(long, value_name = "WHAT", value_parser = one_of(ON_NOSPACE), default_value = "pause", hide_default_value = true, hide_possible_values = true)]
    pub on_nospace: OnNoSpace,
    /// Size of the L2 table cache (default: 32 MiB)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    l2_cache: Option<u64>,
    /// Serve metrics for Prometheus (GET /metrics over HTTP) at HOST:PORT or unix:PATH
    ///
    /// With port 0 the system chooses a free port, which is printed. There is no authentication.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<ScrapeAddress>,
    #[command(flatten)]
    cache: CacheOption,
    /// Format of the image (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    keys: Keys,
    #[command(flatten)]
    force: Force,
}

/// Limits the C library's heaps to fewer than its default of eight per processor. Memory freed in
/// one heap cannot be used by another, so a long-running server with many threads grows without
/// this limit (`--bench load` measures it). Requests hardly allocate, so threads do not contend for
/// the heap.
fn share_the_heap() {
    #[cfg(target_env = "gnu")]
    {
        let heaps = std::thread::available_parallelism().map_or(1, |n| n.get().min(64) as i32);
        // SAFETY: sets an option of the C library, which takes its own lock and ignores options
        // that it does not know.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, heaps) };
    }
}

const ON_NOSPACE: &[(&str, OnNoSpace)] =
    &[("pause", OnNoSpace::Pause), ("report", OnNoSpace::Report)];

impl ServedDisk {
    /// The options for opening the image.
    pub fn options(&self) -> OpenOptions {
        let snapshot = self.snapshot.snapshot.clone();
        let mut options = OpenOptions::default()
            .maybe_format(self.format.clone())
            .writable(!self.read_only && snapshot.is_none())
            .cache(self.cache.cache)
            .refs(self.references.policy())
            .snapshot(snapshot);
        if let Some(bytes) = self.l2_cache {
            options.limits.cache_bytes = bytes;
        }
        self.keys.apply(options)
    }

    /// Opens the image.
    ///
    /// # Errors
    /// As [`Disk::open`]; also if clients could write to an image that others depend on.
    pub fn open(
        &self,
        session: &Session,
        image: &Path,
        cancel: &CancelToken,
    ) -> Result<Disk, Failure> {
        share_the_heap();
        let options = self.options();
        if options.writable {
            guard::refuse_dependents(
                image,
                self.force.force,
                "letting clients write to it",
                cancel,
            )
            .map_err(|failure| failure.hint(SERVED_BENEATH))?;
        }
        session.open(image, &options)
    }

    /// Starts the metrics server, if the user asked for it.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start_metrics(&self, export: &Arc<Export>) -> Result<Option<Scrape>, Failure> {
        let Some(address) = &self.metrics else { return Ok(None) };
        let scrape = Scrape::start(address, Arc::clone(export))
            .map_err(|error| Failure::failed(format!("--metrics {address}: {error}")))?;
        Ok(Some(scrape))
    }
}
