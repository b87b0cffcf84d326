//! Fixed newstyle negotiation: from a socket to an export.
//!
//! ```text
//!   greeting ─► [STARTTLS ─► TLS] ─► STRUCTURED_REPLY ─► SET_META_CONTEXT ─► GO
//!                                                                            └─ unknown: EXPORT_NAME
//! ```
//!
//! The server is untrusted. It has until a deadline in all, answers an option at most
//! [`ANSWERS_MAX`] times, each time with at most [`ANSWER_BYTES_MAX`] bytes.

use std::io;
use std::time::Instant;

use vdkit_block::bytes::{be16, be32, be64};

use crate::channel::{Channel, Socket};
use crate::failure::message_of;
use crate::tls::Tls;
use crate::wire::{self, STRING_MAX, answer, flag, handshake, info, option};

/// Maximum replies to one option: a list of exports.
const ANSWERS_MAX: u32 = 10_000;
/// Maximum bytes of one reply to an option: two strings, and their lengths.
const ANSWER_BYTES_MAX: u32 = 2 * STRING_MAX as u32 + 64;
/// Maximum bytes of all replies that are kept.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// Exports in a message.
const NAMED_MAX: usize = 8;
/// Zeroes after the reply to NBD_OPT_EXPORT_NAME.
const PADDING_BYTES: usize = 124;
/// Maximum of the smallest block that a server may demand, from the protocol.
const MINIMUM_BLOCK_MAX: u32 = 64 << 10;

/// Result of a negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Length of the export in bytes.
    pub(crate) bytes: u64,
    /// Transmission flags.
    pub(crate) flags: u16,
    /// Structured replies.
    pub(crate) structured: bool,
    /// Metadata contexts: name and id.
    pub(crate) contexts: Vec<(String, u32)>,
    /// Alignment of requests in bytes, a power of two.
    pub(crate) minimum: u32,
    /// Preferred granularity of requests in bytes, a power of two.
    pub(crate) preferred: u32,
    /// Maximum payload in bytes, a multiple of `minimum`.
    pub(crate) maximum: u32,
}

impl Agreed {
    /// Whether a transmission flag is set.
    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Reply to an option: its type and data.
type Answer = (u32, Vec<u8>);

fn bad(what: impl AsRef<str>) -> io::Error {
    let text = format!("the server broke the protocol: {}", what.as_ref());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// A negotiation under way.
#[derive(Debug)]
pub(crate) struct Handshake {
    channel: Channel,
    until: Instant,
    no_zeroes: bool,
}

impl Handshake {
    /// Reads the greeting, and starts TLS if it is wanted.
    ///
    /// # Errors
    /// Errors of the socket and of TLS; `InvalidData` if the server breaks the protocol;
    /// `TimedOut` after `until`.
    pub(crate) fn begin(socket: Socket, tls: Option<&Tls>, until: Instant) -> io::Result<Self> {
        let mut this = Self { channel: Channel::Plain(socket), until, no_zeroes: false };
        let mut hello = [0; 16];
        this.recv(&mut hello)?;
        match (be64(&hello, 0), be64(&hello, 8)) {
            (wire::MAGIC, wire::OPTION_MAGIC) => {}
            (wire::MAGIC, wire::OLDSTYLE_MAGIC) => {
                let what =
                    "the server knows only the oldstyle negotiation, which NBD gave up in 2011";
                return Err(io::Error::new(io::ErrorKind::Unsupported, what));
            }
            _ => return Err(bad("it is no NBD server by its first bytes")),
        }
        let mut flags = [0; 2];
        this.recv(&mut flags)?;
        let flags = be16(&flags, 0);
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            let what = "the server does not know the fixed newstyle negotiation";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        this.no_zeroes = flags & handshake::NO_ZEROES != 0;
        let flags = handshake::FIXED_NEWSTYLE | flags & handshake::NO_ZEROES;
        this.channel.send(&u32::from(flags).to_be_bytes(), &[])?;
        match tls {
            Some(tls) => this.start_tls(tls),
            None => Ok(this),
        }
    }

    fn start_tls(mut self, tls: &Tls) -> io::Result<Self> {
        let (kind, data) = self.ask(option::STARTTLS, &[])?;
        if kind != answer::ACK {
            return Err(refused("TLS", kind, &data));
        }
        let Channel::Plain(socket) = self.channel else { return Err(bad("TLS within TLS")) };
        self.channel = Channel::Tls(Box::new(tls.start(socket, self.until)?));
        Ok(self)
    }

    fn recv(&self, buf: &mut [u8]) -> io::Result<()> {
        self.channel.recv_exact(buf, self.until)
    }

    fn send_option(&self, option: u32, data: &[u8]) -> io::Result<()> {
        let mut head = [0; 16];
        head[..8].copy_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        head[8..12].copy_from_slice(&option.to_be_bytes());
        // Names and queries, each of limited length.
        head[12..].copy_from_slice(&(data.len() as u32).to_be_bytes());
        self.channel.send(&head, data)
    }

    /// One reply to an option.
    fn reply(&self, option: u32) -> io::Result<Answer> {
        let mut head = [0; 20];
        self.recv(&mut head)?;
        if be64(&head, 0) != wire::OPTION_REPLY_MAGIC {
            return Err(bad("a reply to an option without its magic number"));
        }
        if be32(&head, 8) != option {
            return Err(bad(format!("a reply to option {} instead of {option}", be32(&head, 8))));
        }
        let len = be32(&head, 16);
        if len > ANSWER_BYTES_MAX {
            return Err(bad(format!("a reply of {len} bytes to option {option}")));
        }
        let mut data = vec![0; len as usize];
        self.recv(&mut data)?;
        Ok((be32(&head, 12), data))
    }

    /// An option that has one reply.
    fn ask(&self, option: u32, data: &[u8]) -> io::Result<Answer> {
        self.send_option(option, data)?;
        self.reply(option)
    }

    /// An option that has several replies: those before the last one, and the last one.
    fn ask_all(&self, option: u32, data: &[u8]) -> io::Result<(Vec<Answer>, Answer)> {
        self.send_option(option, data)?;
        let (mut replies, mut kept) = (Vec::new(), 0);
        for _ in 0..ANSWERS_MAX {
            let reply = self.reply(option)?;
            if reply.0 == answer::ACK || reply.0 & answer::ERROR != 0 {
                return Ok((replies, reply));
            }
            kept += reply.1.len();
            if kept > KEPT_BYTES_MAX {
                break;
            }
            replies.push(reply);
        }
        Err(bad(format!("endless replies to option {option}")))
    }

    /// Asks for something that takes no data, such as structured replies; whether the server has it.
    ///
    /// # Errors
    /// As [`Handshake::begin`]; `PermissionDenied` if the server takes only TLS.
    pub(crate) fn has(&self, option: u32) -> io::Result<bool> {
        let (kind, data) = self.ask(option, &[])?;
        match kind {
            answer::ACK => Ok(true),
            answer::TLS_REQUIRED => Err(refused("plain connections", kind, &data)),
            kind if kind & answer::ERROR != 0 => Ok(false),
            kind => Err(bad(format!("reply {kind} to option {option}"))),
        }
    }

    /// NBD_OPT_INFO or NBD_OPT_GO: what the server reports about an export, and its last reply.
    fn ask_about(&self, option: u32, export: &[u8]) -> io::Result<(ExportInfo, Answer)> {
        let mut data = string(export);
        data.extend([1u16, info::BLOCK_SIZE].into_iter().flat_map(u16::to_be_bytes));
        let (replies, last) = self.ask_all(option, &data)?;
        let mut reported = ExportInfo::default();
        for (_, data) in replies.iter().filter(|(kind, _)| *kind == answer::INFO) {
            match (be16(data, 0), data.len()) {
                (info::EXPORT, 12) => {
                    (reported.bytes, reported.flags) = (be64(data, 2), be16(data, 10));
                }
                (info::BLOCK_SIZE, 14) => {
                    reported.block_bytes = Some([be32(data, 2), be32(data, 6), be32(data, 10)]);
                }
                (info::EXPORT | info::BLOCK_SIZE, len) => {
                    return Err(bad(format!("{len} bytes of information about the export")));
                }
                _ => {}
            }
        }
        Ok((reported, last))
    }

    /// What the server reports about an export without opening it; `None` if it does not know
    /// NBD_OPT_INFO, or refuses the export.
    ///
    /// # Errors
    /// As [`Handshake::begin`].
    pub(crate) fn info(&self, export: &[u8]) -> io::Result<Option<ExportInfo>> {
        let (reported, (kind, _)) = self.ask_about(option::INFO, export)?;
        Ok((kind == answer::ACK).then_some(reported))
    }

    /// Opens an export for simple replies. The socket has no time limits then.
    ///
    /// # Errors
    /// As [`Handshake::begin`].
    pub(crate) fn go_simple(&self, export: &str) -> io::Result<ExportInfo> {
        let (reported, (kind, text)) = self.ask_about(option::GO, export.as_bytes())?;
        if kind != answer::ACK {
            return Err(refused("this export", kind, &text));
        }
        self.channel.set_timeout(None)?;
        Ok(reported)
    }

    /// Negotiates an export, with these metadata contexts if the server has them.
    ///
    /// # Errors
    /// As [`Handshake::begin`]; `NotFound` for an unknown export, with the names of some that exist.
    pub(crate) fn go(self, export: &str, wanted: &[String]) -> io::Result<(Channel, Agreed)> {
        let structured = self.has(option::STRUCTURED_REPLY)?;
        let contexts = match structured && !wanted.is_empty() {
            true => self.contexts(option::SET_META_CONTEXT, export.as_bytes(), wanted)?,
            false => Vec::new(),
        };
        let mut agreed = Agreed {
            bytes: 0,
            flags: 0,
            structured,
            contexts,
            minimum: 1,
            preferred: 4096,
            maximum: wire::PAYLOAD_MAX,
        };
        let (reported, (kind, text)) = self.ask_about(option::GO, export.as_bytes())?;
        if kind == answer::UNSUPPORTED {
            return self.go_by_name(export, agreed);
        }
        if kind == answer::UNKNOWN {
            return Err(self.unknown(export, &text));
        }
        if kind != answer::ACK {
            return Err(refused("this export", kind, &text));
        }
        if reported.flags == 0 {
            return Err(bad("it does not say how long the export is"));
        }
        (agreed.bytes, agreed.flags) = (reported.bytes, reported.flags);
        if let Some(blocks) = reported.block_bytes {
            set_blocks(&mut agreed, blocks)?;
        }
        checked(agreed).map(|agreed| (self.channel, agreed))
    }

    /// NBD_OPT_EXPORT_NAME, for servers that do not know NBD_OPT_GO. It has no error reply.
    fn go_by_name(self, export: &str, mut agreed: Agreed) -> io::Result<(Channel, Agreed)> {
        self.send_option(option::EXPORT_NAME, export.as_bytes())?;
        let mut reply = [0; 10];
        self.recv(&mut reply).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::new(
                io::ErrorKind::NotFound,
                format!("the server has no export '{export}', or refuses it"),
            ),
            _ => error,
        })?;
        if !self.no_zeroes {
            self.recv(&mut [0; PADDING_BYTES])?;
        }
        (agreed.bytes, agreed.flags) = (be64(&reply, 0), be16(&reply, 8));
        checked(agreed).map(|agreed| (self.channel, agreed))
    }

    fn unknown(&self, export: &str, text: &[u8]) -> io::Error {
        let mut why = match export {
            "" => "the server has no default export".to_owned(),
            export => format!("the server has no export '{export}'"),
        };
        if let Some(text) = message_of(text) {
            why.push_str(&format!(" ({text})"));
        }
        // A server may keep its exports secret.
        let exports = self.exports().unwrap_or_default();
        let listed = exports.iter().take(NAMED_MAX);
        let mut names: Vec<_> = listed.map(|(_, one)| one.name.as_str()).collect();
        if exports.len() > NAMED_MAX {
            names.push("…");
        }
        if !names.is_empty() {
            why.push_str(&format!("; it has: {}", names.join(", ")));
        }
        io::Error::new(io::ErrorKind::NotFound, why)
    }

    /// The exports that the server lists, each with the exact name, for requests.
    ///
    /// # Errors
    /// As [`Handshake::begin`]; `PermissionDenied` if the server refuses.
    pub(crate) fn exports(&self) -> io::Result<Vec<(Vec<u8>, ListedExport)>> {
        let (replies, (kind, text)) = self.ask_all(option::LIST, &[])?;
        if kind != answer::ACK {
            return Err(refused("to list its exports", kind, &text));
        }
        let listed = |data: &[u8]| {
            let (name, description) = data.get(4..)?.split_at_checked(be32(data, 0) as usize)?;
            let printable = message_of(name).unwrap_or_default();
            let one = ListedExport { name: printable, description: message_of(description) };
            Some((name.to_vec(), one))
        };
        let replies = replies.iter().filter(|(kind, _)| *kind == answer::SERVER);
        replies.map(|(_, data)| listed(data).ok_or_else(|| bad("a list of exports"))).collect()
    }

    /// Sets or lists metadata contexts of an export; no contexts if the server knows none.
    ///
    /// # Errors
    /// As [`Handshake::begin`].
    pub(crate) fn contexts(
        &self,
        option: u32,
        export: &[u8],
        queries: &[String],
    ) -> io::Result<Vec<(String, u32)>> {
        let mut data = string(export);
        data.extend((queries.len() as u32).to_be_bytes());
        queries.iter().for_each(|query| data.extend(string(query.as_bytes())));
        let (replies, (kind, _)) = self.ask_all(option, &data)?;
        if kind != answer::ACK {
            return Ok(Vec::new());
        }
        let mut contexts = Vec::new();
        for (_, data) in replies.iter().filter(|(kind, _)| *kind == answer::META_CONTEXT) {
            let name = data.get(4..).and_then(|name| std::str::from_utf8(name).ok());
            let name = name.ok_or_else(|| bad("a metadata context without a name"))?;
            contexts.push((name.to_owned(), be32(data, 0)));
        }
        if option == option::SET_META_CONTEXT {
            // The ids of others would have no meaning here.
            contexts.retain(|(name, _)| queries.contains(name));
        }
        Ok(contexts)
    }

    /// Ends the negotiation without an export.
    pub(crate) fn abort(self) {
        // The server may have closed the connection.
        let _ = self.send_option(option::ABORT, &[]);
        self.channel.shutdown();
    }
}

/// An export that a server lists.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedExport {
    /// Its name as one printable line of at most 512 characters; empty for the default export.
    pub name: String,
    /// The server's description of it.
    pub description: Option<String>,
}

/// What a server reports about an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportInfo {
    /// Its length in bytes.
    pub bytes: u64,
    /// Transmission flags; 0 if the server sent none.
    pub flags: u16,
    /// Minimum, preferred and maximum bytes of a request, if the server sent them.
    pub block_bytes: Option<[u32; 3]>,
}

/// An export, with all that a server reports about it without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DescribedExport {
    /// Its name, and the server's description.
    pub listed: ListedExport,
    /// Length, flags and block sizes; `None` if the server reports them only when it opens the export.
    pub info: Option<ExportInfo>,
    /// The server has extended headers, with lengths of 64 bits.
    pub extended: bool,
    /// Its metadata contexts.
    pub contexts: Vec<String>,
}

/// A string with its length before it.
fn string(text: &[u8]) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text);
    bytes
}

/// Takes the server's block sizes over, if they make sense.
fn set_blocks(agreed: &mut Agreed, blocks: [u32; 3]) -> io::Result<()> {
    let [minimum, preferred, maximum] = blocks;
    let power = minimum.is_power_of_two() && minimum <= MINIMUM_BLOCK_MAX;
    let largest = maximum.min(wire::PAYLOAD_MAX) & !(minimum.max(1) - 1);
    if !power || !preferred.is_power_of_two() || preferred < minimum || largest < minimum {
        return Err(bad(format!("blocks of {minimum}, {preferred} and {maximum} bytes")));
    }
    (agreed.minimum, agreed.preferred, agreed.maximum) = (minimum, preferred, largest);
    Ok(())
}

fn checked(agreed: Agreed) -> io::Result<Agreed> {
    if agreed.bytes > i64::MAX as u64 {
        return Err(bad(format!("an export of {} bytes", agreed.bytes)));
    }
    if !agreed.has(flag::HAS_FLAGS) {
        return Err(bad("transmission flags without the flag that they exist"));
    }
    Ok(agreed)
}

/// The error for a server that refuses an option.
fn refused(what: &str, kind: u32, data: &[u8]) -> io::Error {
    let (error, why) = match kind {
        answer::TLS_REQUIRED => (
            io::ErrorKind::PermissionDenied,
            "it takes only TLS: begin the name with 'nbds' instead of 'nbd'",
        ),
        answer::UNSUPPORTED => (io::ErrorKind::Unsupported, "it does not know it"),
        answer::POLICY => (io::ErrorKind::PermissionDenied, "its settings forbid it"),
        answer::INVALID => (io::ErrorKind::InvalidInput, "it calls the request invalid"),
        answer::PLATFORM => (io::ErrorKind::Unsupported, "its platform lacks it"),
        answer::UNKNOWN => (io::ErrorKind::NotFound, "it has no such export"),
        answer::SHUTDOWN => (io::ErrorKind::ConnectionRefused, "it is shutting down"),
        answer::BLOCK_SIZE_REQUIRED => {
            (io::ErrorKind::Unsupported, "it demands block sizes that were asked for")
        }
        answer::TOO_BIG => (io::ErrorKind::InvalidInput, "it calls the request too big"),
        _ => (io::ErrorKind::InvalidData, "it answers with an unknown reply"),
    };
    let text = match message_of(data) {
        Some(message) => format!("the server refuses {what}: {why} ({message})"),
        None => format!("the server refuses {what}: {why}"),
    };
    io::Error::new(error, text)
}
