//! Images on HTTP servers: in place by ranges, or as a stream.
//!
//! ```text
//!   read_up_to ─► block in the cache? ──────────────────────────────► bytes
//!                   │ no: being fetched? ─► wait
//!                   └─ no: fetch it here     GET Range: bytes=FROM-TO
//!                                            broken off ─► resumed
//!   sequential reads ─► other threads fetch the next blocks
//! ```
//!
//! Source: RFC 9110, sections 8.8 (validators), 13.1 (preconditions), 14 (range requests); RFC 9112,
//! section 6.3 (length of a body).

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};
use vdkit_block::{CancelToken, Error, HostOffset, IoAction, Result, Storage, StorageCaps};

use crate::unpack::ByteStream;

/// Bytes per range request.
const BLOCK_BYTES: u64 = 4 << 20;
/// Blocks of readahead.
const AHEAD: u64 = 6;
/// Cached blocks: readahead, those read by several threads, and some behind.
const BLOCKS_MAX: usize = 16;
/// A server that sends nothing for this long is considered dead.
const SILENCE: Duration = Duration::from_secs(30);
/// Retries end when less than [`PACE_BYTES`] arrive in this time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Minimum bytes per [`PATIENCE`]; a slower server counts as dead.
const PACE_BYTES: u64 = 64 << 10;
/// The same before the first answer: the name may be wrong.
const PATIENCE_AT_FIRST: Duration = Duration::from_secs(3);
/// The first pause between two attempts; each doubles the one before.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Whether a name is an URL with a supported scheme.
pub fn is_url(name: &str) -> bool {
    let scheme = name.split_once("://").map_or("", |(scheme, _)| scheme);
    scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")
}

/// How an URL can be read.
#[derive(Debug)]
pub enum Remote {
    /// The server supports ranges.
    Ranges(Arc<HttpStorage>),
    /// The server sends only the whole resource.
    Whole(ByteStream),
}

/// Opens an URL given by the user. (URLs in image metadata are never opened.)
///
/// # Errors
/// [`Error::File`] if the server is unreachable, or has no such resource.
pub fn open_url(url: &str, cancel: &CancelToken) -> Result<Remote> {
    open_patiently(url, cancel, PATIENCE_AT_FIRST, PATIENCE)
}

fn open_patiently(
    url: &str,
    cancel: &CancelToken,
    at_first: Duration,
    patience: Duration,
) -> Result<Remote> {
    let client = Client::new(url, cancel, patience);
    let mut tries = Tries::new(&client, at_first);
    loop {
        let mut waited = Duration::ZERO;
        let got = timed(&mut waited, || client.get(Some((0, BLOCK_BYTES - 1)), None));
        let response = match got {
            Ok(response) => response,
            Err(failure) => {
                tries.progress(0, waited);
                tries.again(failure)?;
                continue;
            }
        };
        let version = Version::of(response.headers());
        if response.status() != StatusCode::PARTIAL_CONTENT {
            let (len, chunked) = (content_length(response.headers()), is_chunked(&response));
            let pace = Pace::new(patience);
            let cancel = cancel.clone();
            let reader = CancellableBody { body: response.into_body(), cancel, pace };
            let stream = ByteStream::new(url, WholeBody::new(reader, len));
            return Ok(Remote::Whole(match len {
                Some(len) => stream.with_len(len),
                None if chunked => stream,
                None => stream.close_delimited(),
            }));
        }
        let Some((0, _, Some(len))) = content_range(response.headers()) else {
            return Err(client.fail("answers a range request without saying how long the file is"));
        };
        return Ok(Remote::Ranges(Arc::new(HttpStorage::new(client, version, len))));
    }
}

/// Failure of a request.
enum Failure {
    /// Transient: worth a retry.
    Passing(String),
    /// Permanent.
    Lasting(String),
    Cancelled,
}

/// One resource on one server.
#[derive(Clone)]
struct Client {
    url: String,
    agent: Agent,
    cancel: CancelToken,
    patience: Duration,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Client {
    fn new(url: &str, cancel: &CancelToken, patience: Duration) -> Self {
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::PlatformVerifier)
            .unversioned_rustls_crypto_provider(Arc::new(
                rustls::crypto::aws_lc_rs::default_provider(),
            ))
            .build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .user_agent(concat!("vdkit/", env!("CARGO_PKG_VERSION")))
            // A compressed response would have other offsets.
            .accept_encoding("identity")
            .http_status_as_error(false)
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .max_idle_connections_per_host(AHEAD as usize + 2)
            .build();
        Self { url: url.to_owned(), agent: config.into(), cancel: cancel.clone(), patience }
    }

    fn fail(&self, why: &str) -> Error {
        let source = io::Error::other(format!("the server {why}"));
        Error::file_io(&self.url, IoAction::Open, source)
    }

    /// A response with the requested range, or with the whole resource.
    fn get(
        &self,
        range: Option<(u64, u64)>,
        version: Option<&Version>,
    ) -> Result<Response<Body>, Failure> {
        if self.cancel.is_cancelled() {
            return Err(Failure::Cancelled);
        }
        let mut request = self.agent.get(&self.url);
        if let Some((first, last)) = range {
            request = request.header("Range", format!("bytes={first}-{last}"));
        }
        if let Some(tag) = version.and_then(|version| version.strong_tag()) {
            request = request.header("If-Match", tag);
        }
        let response = request.call().map_err(failure_of)?;
        let status = response.status();
        match status.as_u16() {
            200 | 206 => Ok(response),
            412 => Err(Failure::Lasting(CHANGED.to_owned())),
            408 | 425 | 429 | 500 | 502 | 503 | 504 => {
                Err(Failure::Passing(format!("answers {status}")))
            }
            _ => Err(Failure::Lasting(format!("answers {status}"))),
        }
    }
}

const CHANGED: &str = "has another file there now than when it was opened; start again";

fn failure_of(error: ureq::Error) -> Failure {
    match error {
        ureq::Error::BadUri(_)
        | ureq::Error::HostNotFound
        | ureq::Error::InvalidProxyUrl
        | ureq::Error::TooManyRedirects
        | ureq::Error::Rustls(_)
        | ureq::Error::Tls(_) => Failure::Lasting(format!("cannot be asked: {error}")),
        // An untrusted certificate does not become trusted by a retry.
        ureq::Error::Io(error)
            if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) =>
        {
            Failure::Lasting(format!("cannot be trusted: {error}"))
        }
        other => Failure::Passing(format!("cannot be asked: {other}")),
    }
}

/// Runs a call that waits for the server, and adds the time that it took. Part of that time the
/// process may have been stopped, so no more than [`SILENCE`] is added.
fn timed<T>(waited: &mut Duration, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = call();
    *waited += start.elapsed().min(SILENCE);
    result
}

/// Tracks whether [`PACE_BYTES`] arrive in time. Only time spent waiting for the server counts: the
/// reader may pause for as long as it likes.
#[derive(Clone, Copy, Debug)]
struct Pace {
    patience: Duration,
    waited: Duration,
    bytes: u64,
}

const TOO_SLOW: &str = "sends less than 64 KiB a minute";

impl Pace {
    fn new(patience: Duration) -> Self {
        Self { patience, waited: Duration::ZERO, bytes: 0 }
    }

    /// Counts received bytes, and the time waited for them.
    fn count(&mut self, bytes: u64, waited: Duration) {
        self.bytes += bytes;
        self.waited += waited;
        if self.bytes >= PACE_BYTES {
            *self = Self::new(self.patience);
        }
    }

    /// Whether too few bytes will have arrived after this pause.
    fn too_slow(&self, pause: Duration) -> bool {
        self.waited + pause > self.patience
    }
}

/// Retries of one operation, with pauses.
struct Tries<'a> {
    client: &'a Client,
    pause: Duration,
    pace: Pace,
}

impl<'a> Tries<'a> {
    fn new(client: &'a Client, patience: Duration) -> Self {
        Self { client, pause: PAUSE_MIN, pace: Pace::new(patience) }
    }

    /// Notes what an attempt received, and the time waited for it.
    fn progress(&mut self, bytes: u64, waited: Duration) {
        if bytes > 0 {
            self.pause = PAUSE_MIN;
        }
        self.pace.count(bytes, waited);
    }

    /// Pauses before another attempt, or returns the final error.
    fn again(&mut self, failure: Failure) -> Result<()> {
        let why = match failure {
            Failure::Cancelled => return Err(Error::Interrupted),
            Failure::Lasting(why) => return Err(self.client.fail(&why)),
            Failure::Passing(why) => why,
        };
        if self.pace.too_slow(self.pause) {
            return Err(self.client.fail(&why));
        }
        let until = Instant::now() + self.pause;
        while Instant::now() < until {
            self.client.cancel.check()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        self.pace.count(0, self.pause);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }
}

/// Identifies a version of the resource.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    tag: Option<String>,
    modified: Option<String>,
}

impl Version {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name)?.to_str().ok().map(str::to_owned);
        Self { tag: text("etag"), modified: text("last-modified") }
    }

    /// A strong validator, which guarantees the same bytes.
    fn strong_tag(&self) -> Option<&str> {
        self.tag.as_deref().filter(|tag| !tag.starts_with("W/"))
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get("content-length")?.to_str().ok()?.trim().parse().ok()
}

/// Whether a body comes in chunks, the last of which marks its end. HTTP/1.0 has none.
fn is_chunked(response: &Response<Body>) -> bool {
    let values = response.headers().get_all("transfer-encoding").iter();
    let mut codings =
        values.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    response.version() != ureq::http::Version::HTTP_10
        && codings.any(|coding| coding.trim().eq_ignore_ascii_case("chunked"))
}

/// First byte, last byte and total length, of `bytes 0-99/1000`.
fn content_range(headers: &HeaderMap) -> Option<(u64, u64, Option<u64>)> {
    let text = headers.get("content-range")?.to_str().ok()?;
    let (range, len) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((first.trim().parse().ok()?, last.trim().parse().ok()?, len.trim().parse().ok()))
}

/// A response body; ending too early is an error.
struct WholeBody<R> {
    inner: R,
    left: Option<u64>,
}

impl<R> WholeBody<R> {
    fn new(inner: R, left: Option<u64>) -> Self {
        Self { inner, left }
    }
}

impl<R: Read> Read for WholeBody<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let broken = |why: &str| {
            let text = format!(
                "the connection broke off ({why}), and this server cannot go on from there, since it \
                 knows no ranges; start again"
            );
            io::Error::new(io::ErrorKind::UnexpectedEof, text)
        };
        let got = match self.inner.read(buf) {
            Ok(got) => got,
            // Cancellation is no fault of the server.
            Err(error) if error.get_ref().is_some_and(|inner| inner.is::<Error>()) => {
                return Err(error);
            }
            Err(error) => return Err(broken(&error.to_string())),
        };
        if let Some(left) = &mut self.left {
            if got == 0 && *left > 0 && !buf.is_empty() {
                return Err(broken(&format!("{left} bytes before the end")));
            }
            *left = left.saturating_sub(got as u64);
        }
        Ok(got)
    }
}

struct CancellableBody {
    body: Body,
    cancel: CancelToken,
    pace: Pace,
}

impl Read for CancellableBody {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other(Error::Interrupted));
        }
        let mut waited = Duration::ZERO;
        let got = timed(&mut waited, || self.body.as_reader().read(buf))?;
        self.pace.count(got as u64, waited);
        if self.pace.too_slow(Duration::ZERO) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("the server {TOO_SLOW}")));
        }
        Ok(got)
    }
}

/// State of a block.
#[derive(Clone, Debug)]
enum Block {
    /// Being fetched by a thread.
    Fetching,
    Ready(Arc<Vec<u8>>),
    /// Reported to the next reader; then the fetch is retried.
    Failed(String),
}

#[derive(Debug, Default)]
struct Cache {
    blocks: HashMap<u64, Block>,
    /// Ready blocks, least recently used first.
    used: VecDeque<u64>,
    /// Blocks for helper threads to fetch.
    wanted: VecDeque<u64>,
    /// The block read last, and the number of consecutive sequential reads.
    last: u64,
    streak: u32,
    helpers: u64,
    closed: bool,
}

#[derive(Debug)]
struct Shared {
    client: Client,
    version: Version,
    len: u64,
    cache: Mutex<Cache>,
    changed: Condvar,
}

/// A read-only file on a server with range support.
#[derive(Debug)]
pub struct HttpStorage {
    shared: Arc<Shared>,
}

impl HttpStorage {
    fn new(client: Client, version: Version, len: u64) -> Self {
        let (cache, changed) = (Mutex::default(), Condvar::new());
        Self { shared: Arc::new(Shared { client, version, len, cache, changed }) }
    }
}

impl Drop for HttpStorage {
    fn drop(&mut self) {
        self.shared.cache.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn block_bytes(&self, block: u64) -> u64 {
        BLOCK_BYTES.min(self.len - block * BLOCK_BYTES)
    }

    /// The bytes of a block, fetched here unless another thread is fetching it.
    fn block(self: &Arc<Self>, block: u64) -> Result<Arc<Vec<u8>>> {
        let mut cache = self.cache.lock();
        self.look_ahead(&mut cache, block);
        loop {
            match cache.blocks.get(&block).cloned() {
                Some(Block::Ready(bytes)) => {
                    cache.used.retain(|used| *used != block);
                    cache.used.push_back(block);
                    return Ok(bytes);
                }
                Some(Block::Fetching) => self.changed.wait(&mut cache),
                Some(Block::Failed(why)) => {
                    cache.blocks.remove(&block);
                    // A cancelled fetch is no failure of the server.
                    self.client.cancel.check()?;
                    let source = io::Error::other(why);
                    let at = block * BLOCK_BYTES;
                    let len = self.block_bytes(block);
                    return Err(Error::io(&self.client.url, IoAction::Read, at, len, source));
                }
                None => {
                    cache.wanted.retain(|wanted| *wanted != block);
                    cache.blocks.insert(block, Block::Fetching);
                    drop(cache);
                    self.fetch_into_cache(block);
                    cache = self.cache.lock();
                }
            }
        }
    }

    /// Requests readahead if reads are sequential.
    fn look_ahead(self: &Arc<Self>, cache: &mut Cache, block: u64) {
        if block == cache.last {
            return;
        }
        cache.streak = if block == cache.last + 1 { cache.streak + 1 } else { 0 };
        cache.last = block;
        if cache.streak == 0 {
            cache.wanted.clear();
            return;
        }
        let end = self.len.div_ceil(BLOCK_BYTES);
        for next in block + 1..end.min(block + 1 + AHEAD) {
            if !cache.blocks.contains_key(&next) && !cache.wanted.contains(&next) {
                cache.wanted.push_back(next);
            }
        }
        while cache.helpers < AHEAD.min(cache.wanted.len() as u64) {
            let shared = self.clone();
            let builder = std::thread::Builder::new().name("http".to_owned());
            if builder.spawn(move || shared.help()).is_err() {
                // Readers fetch what no helper has fetched.
                break;
            }
            cache.helpers += 1;
        }
        self.changed.notify_all();
    }

    /// A helper thread: fetches wanted blocks until the storage is dropped.
    fn help(&self) {
        let mut cache = self.cache.lock();
        while !cache.closed {
            let Some(block) = cache.wanted.pop_front() else {
                self.changed.wait(&mut cache);
                continue;
            };
            if cache.blocks.contains_key(&block) {
                continue;
            }
            cache.blocks.insert(block, Block::Fetching);
            drop(cache);
            self.fetch_into_cache(block);
            cache = self.cache.lock();
        }
    }

    fn fetch_into_cache(&self, block: u64) {
        let fetched = self.fetch(block);
        let mut cache = self.cache.lock();
        match fetched {
            Ok(bytes) => {
                cache.blocks.insert(block, Block::Ready(Arc::new(bytes)));
                cache.used.push_back(block);
                while cache.used.len() > BLOCKS_MAX {
                    if let Some(old) = cache.used.pop_front() {
                        cache.blocks.remove(&old);
                    }
                }
            }
            Err(error) => {
                cache.blocks.insert(block, Block::Failed(error.to_string()));
            }
        }
        drop(cache);
        self.changed.notify_all();
    }

    /// Fetches a block, resuming broken connections.
    fn fetch(&self, block: u64) -> Result<Vec<u8>> {
        let (start, len) = (block * BLOCK_BYTES, self.block_bytes(block));
        let mut bytes = Vec::with_capacity(len as usize);
        let mut tries = Tries::new(&self.client, self.client.patience);
        while (bytes.len() as u64) < len {
            let (before, mut waited) = (bytes.len(), Duration::ZERO);
            let done = self.fetch_rest(start, len, &mut bytes, &mut waited);
            tries.progress((bytes.len() - before) as u64, waited);
            if let Err(failure) = done {
                tries.again(failure)?;
            }
        }
        Ok(bytes)
    }

    /// Requests the missing rest of a block. Adds the time waited for the server to `waited`.
    fn fetch_rest(
        &self,
        start: u64,
        len: u64,
        bytes: &mut Vec<u8>,
        waited: &mut Duration,
    ) -> Result<(), Failure> {
        let (first, last) = (start + bytes.len() as u64, start + len - 1);
        let get = || self.client.get(Some((first, last)), Some(&self.version));
        let mut response = timed(waited, get)?;
        let lasting = |why: &str| Err(Failure::Lasting(why.to_owned()));
        if response.status() != StatusCode::PARTIAL_CONTENT
            || Version::of(response.headers()) != self.version
        {
            return lasting(CHANGED);
        }
        match content_range(response.headers()) {
            Some((from, _, whole)) if from == first && whole.is_none_or(|w| w == self.len) => {}
            _ => return lasting("sends another range than it was asked for"),
        }
        let mut reader = response.body_mut().as_reader().take(last + 1 - first);
        let mut piece = [0; 64 << 10];
        let mut pace = Pace::new(self.client.patience);
        while (bytes.len() as u64) < len {
            if self.client.cancel.is_cancelled() {
                return Err(Failure::Cancelled);
            }
            if pace.too_slow(Duration::ZERO) {
                // Another connection may be faster.
                return Err(Failure::Passing(TOO_SLOW.to_owned()));
            }
            let before = *waited;
            match timed(waited, || reader.read(&mut piece)) {
                Ok(0) => return Err(Failure::Passing("broke off in the middle".to_owned())),
                Ok(got) => {
                    bytes.extend_from_slice(&piece[..got]);
                    pace.count(got as u64, *waited - before);
                }
                Err(error) => return Err(Failure::Passing(format!("broke off: {error}"))),
            }
        }
        Ok(())
    }
}

impl Storage for HttpStorage {
    fn name(&self) -> &str {
        &self.shared.client.url
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps::default()
    }

    fn len(&self) -> Result<u64> {
        Ok(self.shared.len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let there = self.shared.len.saturating_sub(offset.0).min(buf.len() as u64) as usize;
        let mut done = 0;
        while done < there {
            let at = offset.0 + done as u64;
            let bytes = self.shared.block(at / BLOCK_BYTES)?;
            let within = (at % BLOCK_BYTES) as usize;
            let run = (there - done).min(bytes.len() - within);
            buf[done..done + run].copy_from_slice(&bytes[within..within + run]);
            done += run;
        }
        Ok(there)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
