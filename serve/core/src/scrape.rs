//! The counters over HTTP, for Prometheus: `GET /metrics`.
//!
//! One thread serves all connections with poll(2) and never blocks on one. Request size, connection
//! time and the number of connections are bounded. When all slots are taken, the oldest connection
//! is closed, so idle clients exclude nobody.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags};

use crate::export::Export;
use crate::metrics;
use crate::socket::{ACCEPT_PAUSE, Access, UnixSocket, Wake, Worker};

/// Maximum connections.
const CLIENTS_MAX: usize = 16;
/// Maximum duration of a connection.
const CLIENT_TIME: Duration = Duration::from_secs(10);
/// Maximum request head; Prometheus sends a few hundred bytes.
const HEAD_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;

/// Address of the metrics server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrapeAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// `HOST:PORT`; port 0 picks a free one.
    Tcp(String),
}

impl std::str::FromStr for ScrapeAddress {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        let rest = text.strip_prefix("tcp:").unwrap_or(text);
        match rest.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(rest.to_owned()))
            }
            _ => Err(format!("'{text}' is no address: write HOST:PORT or unix:PATH")),
        }
    }
}

impl fmt::Display for ScrapeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

/// Serves `GET /metrics` until dropped. In a child of `fork`, dropping it ends nothing.
#[derive(Debug)]
pub struct Scrape {
    address: ScrapeAddress,
    bound: Option<SocketAddr>,
    _worker: Worker,
}

impl Scrape {
    /// Listens.
    ///
    /// # Errors
    /// Errors of the system; as [`UnixSocket::bind`].
    pub fn start(address: &ScrapeAddress, export: Arc<Export>) -> io::Result<Self> {
        let (listener, bound): (Box<dyn AsFd + Send>, _) = match address {
            ScrapeAddress::Unix(path) => (Box::new(UnixSocket::bind(path, Access::Usual)?), None),
            ScrapeAddress::Tcp(address) => {
                let listener = TcpListener::bind(address.as_str())?;
                let bound = listener.local_addr()?;
                (Box::new(listener), Some(bound))
            }
        };
        // A connection may close between poll and accept.
        rustix::io::ioctl_fionbio(&listener, true)?;
        let text = move || metrics::text(&export);
        Self::begin(address.clone(), bound, listener, CLIENT_TIME, text)
    }

    fn begin(
        address: ScrapeAddress,
        bound: Option<SocketAddr>,
        listener: impl AsFd + Send + 'static,
        time: Duration,
        text: impl Fn() -> String + Send + 'static,
    ) -> io::Result<Self> {
        let serving = move |woken: &Wake| serve(listener.as_fd(), woken, time, &text);
        Ok(Self { address, bound, _worker: Worker::start("metrics", serving)? })
    }

    /// Its address: a URL, or `unix:PATH`.
    pub fn place(&self) -> String {
        match self.bound {
            Some(bound) => format!("http://{bound}/metrics"),
            None => self.address.to_string(),
        }
    }
}

fn serve(listener: BorrowedFd<'_>, woken: &Wake, time: Duration, text: &dyn Fn() -> String) {
    // The oldest first.
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let Some(ready) = wait(listener, woken, &clients) else { return };
        let now = Instant::now();
        let mut ready_clients = ready.clients.into_iter();
        clients.retain_mut(|client| {
            let ready = ready_clients.next().unwrap_or(false);
            now < client.until && (!ready || client.go_on(text))
        });
        if !ready.listener {
            continue;
        }
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                if clients.len() >= CLIENTS_MAX {
                    clients.remove(0);
                }
                clients.push(Client::new(socket, now + time));
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => {
                tracing::warn!("metrics: a connection was not accepted: {errno}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Result of a poll.
struct Ready {
    listener: bool,
    clients: Vec<bool>,
}

/// Polls all sockets; `None` at the end.
fn wait(listener: BorrowedFd<'_>, woken: &Wake, clients: &[Client]) -> Option<Ready> {
    let mut all = vec![PollFd::new(woken, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
    all.extend(clients.iter().map(|client| PollFd::new(&client.socket, client.awaits())));
    let now = Instant::now();
    let first = clients.iter().map(|client| client.until.saturating_duration_since(now)).min();
    let timeout = first.and_then(|time| Timespec::try_from(time).ok());
    match poll(&mut all, timeout.as_ref()) {
        // None is ready then; deadlines are still checked.
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => {
            tracing::warn!("metrics are served no more: poll(2): {errno}");
            return None;
        }
    }
    let mut ready = all.iter().map(|one| !one.revents().is_empty());
    if ready.next() == Some(true) {
        return None;
    }
    Some(Ready { listener: ready.next().unwrap_or(false), clients: ready.collect() })
}

/// A connection: one request, one answer.
struct Client {
    socket: OwnedFd,
    until: Instant,
    state: State,
}

enum State {
    /// Receiving the request.
    Receiving(Vec<u8>),
    /// Sending the answer: bytes, and how many were sent.
    Sending(Vec<u8>, usize),
    /// Everything was sent. Wait for the client to close: closing first could lose the answer if
    /// the client sent more than was read.
    Closing,
}

impl Client {
    fn new(socket: OwnedFd, until: Instant) -> Self {
        Self { socket, until, state: State::Receiving(Vec::new()) }
    }

    fn awaits(&self) -> PollFlags {
        match self.state {
            State::Receiving(_) | State::Closing => PollFlags::IN,
            State::Sending(..) => PollFlags::OUT,
        }
    }

    /// Makes progress without waiting; `false` at the end.
    fn go_on(&mut self, text: &dyn Fn() -> String) -> bool {
        match &mut self.state {
            State::Receiving(head) => {
                let mut piece = [0; 1024];
                match rustix::net::recv(&self.socket, &mut piece, RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return false,
                    Ok((n, _)) => head.extend_from_slice(&piece[..n]),
                    Err(error) => return again(error),
                }
                match answer(head, text) {
                    Some(bytes) => self.state = State::Sending(bytes, 0),
                    None => return true,
                }
                self.go_on(text)
            }
            State::Sending(bytes, sent) => {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                match rustix::net::send(&self.socket, &bytes[*sent..], flags) {
                    Ok(n) => *sent += n,
                    Err(error) => return again(error),
                }
                if *sent < bytes.len() {
                    return true;
                }
                self.state = State::Closing;
                rustix::net::shutdown(&self.socket, Shutdown::Write).is_ok()
            }
            State::Closing => {
                let mut rest = [0; 1024];
                match rustix::net::recv(&self.socket, &mut rest, RecvFlags::DONTWAIT) {
                    Ok((n, _)) => n > 0,
                    Err(error) => again(error),
                }
            }
        }
    }
}

fn again(error: Errno) -> bool {
    matches!(error, Errno::AGAIN | Errno::INTR)
}

/// The answer to a request, once its head is complete.
fn answer(head: &[u8], text: &dyn Fn() -> String) -> Option<Vec<u8>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let too_large = || Some(response("431 Request Header Fields Too Large", "too much\n", true));
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if head.len() < HEAD_MAX => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => return too_large(),
        Err(_) => return Some(response("400 Bad Request", "not HTTP\n", true)),
    }
    let with_body = match request.method {
        Some("GET") => true,
        Some("HEAD") => false,
        _ => {
            let status = "405 Method Not Allowed\r\nAllow: GET, HEAD";
            return Some(response(status, "GET /metrics\n", true));
        }
    };
    let path = path_of(request.path.unwrap_or_default());
    if path != "/metrics" {
        return Some(response("404 Not Found", "the counts are at /metrics\n", with_body));
    }
    Some(response("200 OK", &text(), with_body))
}

/// The path of a request target, which may be an absolute URI. Source: RFC 9112, section 3.2.
fn path_of(target: &str) -> &str {
    let local = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    };
    local.split_once('?').map_or(local, |(path, _)| path)
}

fn response(status: &str, body: &str, with_body: bool) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let mut bytes = head.into_bytes();
    if with_body {
        bytes.extend_from_slice(body.as_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    /// A server with a fixed text.
    fn telling(words: &'static str) -> (Scrape, SocketAddr) {
        within(CLIENT_TIME, words)
    }

    fn within(time: Duration, words: &'static str) -> (Scrape, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let bound = listener.local_addr().unwrap();
        let address = ScrapeAddress::Tcp(bound.to_string());
        let scrape = Scrape::begin(address, Some(bound), listener, time, || words.to_owned());
        (scrape.unwrap(), bound)
    }

    fn ask(bound: SocketAddr, request: &[u8]) -> String {
        let mut socket = TcpStream::connect(bound).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let _ = socket.write_all(request);
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        text
    }

    const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

    #[test]
    fn addresses() {
        let parse = |text: &str| text.parse::<ScrapeAddress>();
        for text in ["127.0.0.1:9100", "tcp:127.0.0.1:9100"] {
            assert_eq!(parse(text), Ok(ScrapeAddress::Tcp("127.0.0.1:9100".to_owned())));
        }
        assert_eq!(parse("[::1]:0"), Ok(ScrapeAddress::Tcp("[::1]:0".to_owned())));
        assert_eq!(parse("unix:/run/m"), Ok(ScrapeAddress::Unix("/run/m".into())));
        for text in ["", "unix:", "9100", ":9100", "host:", "host:99999", "tcp:host"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_child_of_fork_ends_nothing() {
        let (scrape, bound) = telling("words\n");
        let mut scrape = Some(scrape);
        assert!(vdkit_testkit::in_child(|| (), || scrape.take().is_some()));
        assert!(ask(bound, GET).starts_with("HTTP/1.1 200 OK\r\n"));
    }

    #[test]
    fn the_end_does_not_wait_for_a_child_of_fork() {
        let (scrape, _) = telling("words\n");
        // The child has copies of all descriptors until then.
        assert!(vdkit_testkit::in_child(|| drop(scrape), || true));
    }

    #[test]
    fn answers_are_what_http_wants() {
        let (_scrape, bound) = telling("words\n");
        let whole = ask(bound, GET);
        assert!(whole.starts_with("HTTP/1.1 200 OK\r\n"), "{whole}");
        assert!(whole.contains("Content-Type: text/plain; version=0.0.4"), "{whole}");
        assert!(
            whole.ends_with("Content-Length: 6\r\nConnection: close\r\n\r\nwords\n"),
            "{whole}"
        );
        let head = ask(bound, b"HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.ends_with("Content-Length: 6\r\nConnection: close\r\n\r\n"), "{head}");
        for (request, status) in [
            (&b"GET /metrics?x=1 HTTP/1.0\r\n\r\n"[..], "200"),
            (b"GET http://host/metrics HTTP/1.1\r\n\r\n", "200"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"GET /metrics/x HTTP/1.1\r\n\r\n", "404"),
            (b"GET http://host HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405"),
            (b"\x16\x03\x01\0\x01\r\n\r\n", "400"),
            (b"GET /metrics\r\n\r\n", "400"),
        ] {
            let text = ask(bound, request);
            assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {text}");
        }
        let many = [b"GET /metrics HTTP/1.1\r\n".to_vec(), b"A: b\r\n".repeat(100)].concat();
        assert!(ask(bound, &many).starts_with("HTTP/1.1 431 "));
        let long = [b"GET /metrics HTTP/1.1\r\nA: ".to_vec(), vec![b'x'; 9000]].concat();
        assert!(ask(bound, &long).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn who_says_nothing_keeps_nobody_out() {
        // No timeout during this test.
        let (scrape, bound) = within(Duration::from_secs(3600), "words\n");
        let silent: Vec<TcpStream> =
            (0..3 * CLIENTS_MAX).map(|_| TcpStream::connect(bound).unwrap()).collect();
        // Half a request each; the server has closed some of them already.
        for mut socket in &silent {
            let _ = socket.write_all(b"GET /metr");
        }
        assert!(ask(bound, GET).ends_with("words\n"));
        // A request in pieces.
        let mut slow = TcpStream::connect(bound).unwrap();
        for piece in GET.chunks(5) {
            slow.write_all(piece).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut text = String::new();
        slow.read_to_string(&mut text).unwrap();
        assert!(text.ends_with("words\n"));
        // Open connections do not delay the end.
        drop(scrape);
        assert!(TcpStream::connect(bound).is_err());
    }

    #[test]
    fn time_is_bounded() {
        let (_scrape, bound) = within(Duration::from_millis(100), "words\n");
        let mut silent = TcpStream::connect(bound).unwrap();
        silent.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        // (On a slow machine the timeout may already have passed.)
        let _ = silent.write_all(b"GET /metr");
        let ended = match silent.read(&mut [0]) {
            Ok(got) => got == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        };
        assert!(ended, "it should have been ended");
        // A client that was answered but does not close is disconnected too.
        let asked = (0..100).find_map(|_| {
            let mut there = TcpStream::connect(bound).unwrap();
            there.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
            let mut text = String::new();
            let told = there.write_all(GET).and_then(|()| there.read_to_string(&mut text));
            (told.is_ok() && text.ends_with("words\n")).then_some(there)
        });
        let mut there = asked.expect("an answer in time");
        let ended = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            there.write_all(b"x").is_err()
        });
        assert!(ended, "a connection without an end");
    }
}
