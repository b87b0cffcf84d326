//! A small HTTP server with faults, on a port of its own.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a server does.
#[derive(Clone, Debug, Default)]
pub struct HttpFaults {
    /// It knows no ranges: it sends everything always.
    pub no_ranges: bool,
    /// It breaks off after so many bytes of each answer.
    pub cut_after: Option<usize>,
    /// It answers 503 to so many requests first.
    pub busy: u64,
    /// From this request on it has another file.
    pub changes_at: Option<u64>,
    /// It sends byte by byte, with so long a pause before each.
    pub trickle: Option<std::time::Duration>,
}

/// Serves one file under any name until it is dropped.
#[derive(Debug)]
pub struct HttpServer {
    url: String,
    requests: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl HttpServer {
    /// A server of these bytes.
    ///
    /// # Panics
    /// If the system gives no port.
    pub fn start(bytes: Vec<u8>, faults: HttpFaults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/disk", listener.local_addr().expect("an address"));
        let requests = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (bytes, faults) = (Arc::new(bytes), Arc::new(faults));
        let (counted, stopped) = (requests.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (bytes, faults, counted) = (bytes.clone(), faults.clone(), counted.clone());
                std::thread::spawn(move || serve(stream, &bytes, &faults, &counted));
            }
        });
        Self { url, requests, stop, thread: Some(thread) }
    }

    /// Where it is.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Requests so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let address = self.url.trim_start_matches("http://").trim_end_matches("/disk");
        let _ = TcpStream::connect(address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One request a connection. A client that goes away is no fault.
fn serve(stream: TcpStream, bytes: &[u8], faults: &HttpFaults, requests: &AtomicU64) {
    let _ = answer(stream, bytes, faults, requests);
}

fn answer(
    mut stream: TcpStream,
    bytes: &[u8],
    faults: &HttpFaults,
    requests: &AtomicU64,
) -> std::io::Result<()> {
    let mut range = None;
    let mut wanted_tag = None;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    if first.is_empty() {
        return Ok(());
    }
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        let Some((name, value)) = line.split_once(':') else { continue };
        match name.to_ascii_lowercase().as_str() {
            "range" => range = parse_range(value.trim()),
            "if-match" => wanted_tag = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    let number = requests.fetch_add(1, Ordering::Relaxed);
    if number < faults.busy {
        return stream.write_all(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n");
    }
    let tag = if faults.changes_at.is_some_and(|at| number >= at) { "\"two\"" } else { "\"one\"" };
    if wanted_tag.is_some_and(|wanted| wanted != tag) {
        return stream.write_all(b"HTTP/1.1 412 Changed\r\nContent-Length: 0\r\n\r\n");
    }
    let common = format!("ETag: {tag}\r\nConnection: close\r\n");
    let body = match range.filter(|_| !faults.no_ranges) {
        Some((start, end)) if start < bytes.len() => {
            let end = (end + 1).min(bytes.len());
            let head = format!(
                "HTTP/1.1 206 Part\r\nContent-Range: bytes {start}-{}/{}\r\nContent-Length: {}\r\n\
                 {common}\r\n",
                end - 1,
                bytes.len(),
                end - start
            );
            stream.write_all(head.as_bytes())?;
            &bytes[start..end]
        }
        _ => {
            let len = bytes.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n{common}\r\n");
            stream.write_all(head.as_bytes())?;
            bytes
        }
    };
    let cut = faults.cut_after.unwrap_or(body.len()).min(body.len());
    if let Some(pause) = faults.trickle {
        return body[..cut].iter().try_for_each(|byte| {
            std::thread::sleep(pause);
            stream.write_all(&[*byte])
        });
    }
    stream.write_all(&body[..cut])
}

/// First and last byte of `bytes=0-99`.
fn parse_range(text: &str) -> Option<(usize, usize)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?))
}
