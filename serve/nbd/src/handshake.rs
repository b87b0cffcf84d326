//! Fixed newstyle negotiation: from a connection to an export.
//!
//! The peer is untrusted. It has [`HANDSHAKE_TIME`] in all and [`OPTIONS_MAX`] options, none longer
//! than [`OPTION_BYTES_MAX`], and only its choices are stored.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vdkit_serve::Export;

use crate::channel::Channel;
use crate::contexts::{self, Context};
use crate::exports::Exports;
use crate::wire::{self, answer, flag, handshake, info, option};

/// Time limit of the negotiation, from the first byte.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(15);
/// Maximum options per handshake.
const OPTIONS_MAX: u32 = 1024;
/// Maximum data of one option: names and queries.
const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Options that have no data.
const WITHOUT_DATA: [u32; 4] =
    [option::LIST, option::STARTTLS, option::STRUCTURED_REPLY, option::EXTENDED_HEADERS];
/// Preferred request size: a page, and the unit of allocation of file systems.
const PREFERRED_BYTES: u32 = 4096;

/// Result of a negotiation.
#[derive(Debug)]
pub struct Agreed {
    pub export: Arc<Export>,
    /// Structured replies.
    pub structured: bool,
    /// Extended headers with 64-bit lengths; implies `structured`.
    pub extended: bool,
    /// Metadata contexts for block status; the index is the id.
    pub contexts: Vec<Context>,
}

/// What a client said to the server's greeting.
#[derive(Clone, Copy, Debug)]
pub struct Greeted {
    /// The reply to EXPORT_NAME ends without padding.
    no_zeroes: bool,
}

/// End of a negotiation phase.
#[derive(Debug)]
pub enum Outcome {
    /// Go to the transmission phase.
    Go(Box<Agreed>),
    /// Start TLS on this connection and negotiate again within it.
    StartTls(Greeted),
    /// The connection ended.
    End,
}

impl Outcome {
    /// The agreement, if the negotiation succeeded.
    pub fn agreed(self) -> Option<Box<Agreed>> {
        match self {
            Self::Go(agreed) => Some(agreed),
            Self::StartTls(_) | Self::End => None,
        }
    }
}

/// State of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsState {
    /// Not offered by the server.
    None,
    /// Required by the server, and not started.
    Required,
    /// Active.
    Active,
}

/// Called before a client learns that it has reached an export. An error ends the connection.
pub type Reach<'a> = &'a dyn Fn(&Export) -> io::Result<()>;

/// One negotiation.
pub struct Handshake<'a> {
    channel: &'a dyn Channel,
    exports: &'a Exports,
    tls: TlsState,
    until: Instant,
    reach: Reach<'a>,
    /// It is the server's only connection.
    alone: bool,
    structured: bool,
    extended: bool,
    /// The export and contexts chosen by NBD_OPT_SET_META_CONTEXT.
    chosen: Option<(String, Vec<Context>)>,
    no_zeroes: bool,
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Parser of an option's data.
struct Data<'d>(&'d [u8]);

impl<'d> Data<'d> {
    fn take(&mut self, len: usize) -> Option<&'d [u8]> {
        let (piece, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(piece)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|b| u16::from_be_bytes([b[0], b[1]]))
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4).map(|b| wire::be32(b, 0))
    }

    /// A string with a length prefix.
    fn string(&mut self) -> Option<String> {
        let len = self.u32()? as usize;
        let bytes = self.take(len).filter(|_| len <= wire::STRING_MAX)?;
        String::from_utf8(bytes.to_vec()).ok()
    }
}

impl<'a> Handshake<'a> {
    /// A negotiation that starts now, with a deadline `until`.
    pub fn new(
        channel: &'a dyn Channel,
        exports: &'a Exports,
        tls: TlsState,
        until: Instant,
        reach: Reach<'a>,
    ) -> Self {
        Self {
            channel,
            exports,
            tls,
            until,
            reach,
            alone: false,
            structured: false,
            extended: false,
            chosen: None,
            no_zeroes: false,
        }
    }

    /// With `alone`, no client may connect more than once, and none is invited to.
    pub fn alone(self, alone: bool) -> Self {
        Self { alone, ..self }
    }

    fn recv_exact(&self, buf: &mut [u8]) -> io::Result<()> {
        wire::recv_exact(buf, self.until, |rest, left| {
            self.channel.set_timeout(Some(left))?;
            self.channel.recv(rest)
        })
    }

    /// Negotiates. Sends the server's greeting first, which is not repeated within TLS.
    ///
    /// # Errors
    /// Errors of the socket; `InvalidData` for protocol errors; `TimedOut`.
    pub fn run(mut self, greeted: Option<Greeted>) -> io::Result<Outcome> {
        match greeted {
            Some(Greeted { no_zeroes }) => self.no_zeroes = no_zeroes,
            None => self.greet()?,
        }
        for _ in 0..OPTIONS_MAX {
            let mut head = [0; 16];
            self.recv_exact(&mut head)?;
            if wire::be64(&head, 0) != wire::OPTION_MAGIC {
                return Err(bad("an option without its magic number"));
            }
            let (option, len) = (wire::be32(&head, 8), wire::be32(&head, 12));
            if len > OPTION_BYTES_MAX {
                // Perhaps a mistake: skip it, within limits.
                self.skip(len)?;
                self.reply(option, answer::TOO_BIG, b"at most 64 KiB of data to an option")?;
                continue;
            }
            let mut data = vec![0; len as usize];
            self.recv_exact(&mut data)?;
            if let Some(outcome) = self.option(option, &data)? {
                return Ok(outcome);
            }
        }
        Err(bad(format!("more than {OPTIONS_MAX} options")))
    }

    fn skip(&self, len: u32) -> io::Result<()> {
        if len > wire::PAYLOAD_MAX {
            return Err(bad(format!("an option of {len} bytes")));
        }
        let mut sink = [0; 4096];
        let mut left = len as usize;
        while left > 0 {
            let step = left.min(sink.len());
            self.recv_exact(&mut sink[..step])?;
            left -= step;
        }
        Ok(())
    }

    fn greet(&mut self) -> io::Result<()> {
        let mut hello = Vec::with_capacity(18);
        hello.extend(wire::MAGIC.to_be_bytes());
        hello.extend(wire::OPTION_MAGIC.to_be_bytes());
        hello.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
        self.send(&hello)?;
        let mut flags = [0; 4];
        self.recv_exact(&mut flags)?;
        let flags = u32::from_be_bytes(flags);
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            return Err(bad(format!("unknown client flags {flags:#x}")));
        }
        if flags & u32::from(handshake::FIXED_NEWSTYLE) == 0 {
            return Err(bad("a client that does not know fixed newstyle negotiation"));
        }
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        Ok(())
    }

    /// Sends before the deadline: a peer that does not read must not block us.
    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.channel.set_timeout(Some(wire::time_left(self.until)?))?;
        self.channel.send(bytes)
    }

    fn reply(&self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let mut out = Vec::with_capacity(20 + data.len());
        out.extend(wire::OPTION_REPLY_MAGIC.to_be_bytes());
        out.extend(option.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        self.send(&out)
    }

    fn refuse(&self, option: u32, kind: u32, why: &str) -> io::Result<Option<Outcome>> {
        self.reply(option, kind, why.as_bytes())?;
        Ok(None)
    }

    fn acknowledge(&self, option: u32) -> io::Result<Option<Outcome>> {
        self.reply(option, answer::ACK, b"")?;
        Ok(None)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<Option<Outcome>> {
        let before_tls = [option::ABORT, option::STARTTLS];
        if self.tls == TlsState::Required && !before_tls.contains(&option) {
            if option == option::EXPORT_NAME {
                // It has no way to refuse.
                return Ok(Some(Outcome::End));
            }
            return self.refuse(option, answer::TLS_REQUIRED, "this server wants TLS");
        }
        if WITHOUT_DATA.contains(&option) && !data.is_empty() {
            return self.refuse(option, answer::INVALID, "this option has no data");
        }
        match option {
            option::EXPORT_NAME => self.export_name(data).map(Some),
            option::ABORT => {
                // The client may be gone already.
                let _ = self.reply(option, answer::ACK, b"");
                Ok(Some(Outcome::End))
            }
            option::LIST => self.list(),
            option::STARTTLS => self.start_tls(),
            option::INFO | option::GO => self.info(option, data),
            option::STRUCTURED_REPLY if self.extended => {
                let refusal = answer::EXTENDED_HEADERS_REQUIRED;
                self.refuse(option, refusal, "extended headers are in use already")
            }
            option::STRUCTURED_REPLY => {
                self.structured = true;
                self.acknowledge(option)
            }
            option::EXTENDED_HEADERS => {
                self.extended = true;
                self.structured = true;
                self.acknowledge(option)
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta_context(option, data),
            _ => self.refuse(option, answer::UNSUPPORTED, "unknown option"),
        }
    }

    fn start_tls(&self) -> io::Result<Option<Outcome>> {
        let option = option::STARTTLS;
        match self.tls {
            TlsState::None => {
                self.refuse(option, answer::POLICY, "this server was started without TLS")
            }
            TlsState::Active => self.refuse(option, answer::INVALID, "TLS is in use already"),
            TlsState::Required => {
                self.reply(option, answer::ACK, b"")?;
                Ok(Some(Outcome::StartTls(Greeted { no_zeroes: self.no_zeroes })))
            }
        }
    }

    fn list(&self) -> io::Result<Option<Outcome>> {
        for export in self.exports.all() {
            let mut entry = Vec::new();
            entry.extend((export.name().len() as u32).to_be_bytes());
            entry.extend(export.name().as_bytes());
            entry.extend(export.options().description.as_bytes());
            self.reply(option::LIST, answer::SERVER, &entry)?;
        }
        self.acknowledge(option::LIST)
    }

    fn flags(&self, export: &Export) -> u16 {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
        if !self.alone {
            flags |= flag::CAN_MULTI_CONN;
        }
        if export.read_only() {
            flags |= flag::READ_ONLY;
        } else {
            flags |= flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO;
        }
        if self.structured {
            flags |= flag::SEND_DF;
        }
        if self.extended {
            flags |= flag::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }

    fn agreed(&mut self, export: Arc<Export>) -> Outcome {
        let contexts = match self.chosen.take() {
            Some((name, contexts))
                if self.exports.find(&name).is_some_and(|of| Arc::ptr_eq(&of, &export)) =>
            {
                contexts
            }
            _ => Vec::new(),
        };
        Outcome::Go(Box::new(Agreed {
            export,
            structured: self.structured,
            extended: self.extended,
            contexts,
        }))
    }

    /// NBD_OPT_EXPORT_NAME: the reply is the export, or the end of the connection.
    fn export_name(&mut self, data: &[u8]) -> io::Result<Outcome> {
        let found = std::str::from_utf8(data).ok().and_then(|name| self.exports.find(name));
        let Some(export) = found else { return Ok(Outcome::End) };
        if self.extended {
            // This option has no error reply; see "NBD_OPT_EXTENDED_HEADERS".
            return Ok(Outcome::End);
        }
        let mut out = Vec::with_capacity(134);
        out.extend(export.size().to_be_bytes());
        out.extend(self.flags(&export).to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        (self.reach)(&export)?;
        self.send(&out)?;
        Ok(self.agreed(export))
    }

    fn info(&mut self, option: u32, data: &[u8]) -> io::Result<Option<Outcome>> {
        let mut data = Data(data);
        let parsed = (|| {
            let name = data.string()?;
            let count = data.u16()?;
            let wanted: Option<Vec<u16>> = (0..count).map(|_| data.u16()).collect();
            Some((name, wanted?)).filter(|_| data.0.is_empty())
        })();
        let Some((name, wanted)) = parsed else {
            return self.refuse(option, answer::INVALID, "ill-formed");
        };
        let Some(export) = self.exports.find(&name) else {
            return self.refuse(option, answer::UNKNOWN, "no such export");
        };
        let mut export_info = info::EXPORT.to_be_bytes().to_vec();
        export_info.extend(export.size().to_be_bytes());
        export_info.extend(self.flags(&export).to_be_bytes());
        self.reply(option, answer::INFO, &export_info)?;
        let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for bytes in [1, PREFERRED_BYTES, wire::PAYLOAD_MAX] {
            sizes.extend(bytes.to_be_bytes());
        }
        self.reply(option, answer::INFO, &sizes)?;
        for (kind, text) in [
            (info::NAME, export.name()),
            (info::DESCRIPTION, export.options().description.as_str()),
        ] {
            if wanted.contains(&kind) {
                let mut out = kind.to_be_bytes().to_vec();
                out.extend(text.as_bytes());
                self.reply(option, answer::INFO, &out)?;
            }
        }
        if option == option::GO {
            (self.reach)(&export)?;
        }
        self.reply(option, answer::ACK, b"")?;
        Ok((option == option::GO).then(|| self.agreed(export)))
    }

    fn meta_context(&mut self, option: u32, data: &[u8]) -> io::Result<Option<Outcome>> {
        let setting = option == option::SET_META_CONTEXT;
        if setting {
            // A failure clears the previous choice.
            self.chosen = None;
        }
        if !self.structured {
            return self.refuse(option, answer::INVALID, "structured replies come first");
        }
        let mut data = Data(data);
        let parsed = (|| {
            let name = data.string()?;
            let count = data.u32()?;
            let queries: Option<Vec<String>> = (0..count).map(|_| data.string()).collect();
            Some((name, queries?)).filter(|_| data.0.is_empty())
        })();
        let Some((name, queries)) = parsed else {
            return self.refuse(option, answer::INVALID, "ill-formed");
        };
        let Some(export) = self.exports.find(&name) else {
            return self.refuse(option, answer::UNKNOWN, "no such export");
        };
        let found = contexts::matching(&export, &queries, setting);
        for (id, context) in found.iter().enumerate() {
            // Ids are significant only when contexts are set.
            let mut out = if setting { id as u32 } else { 0 }.to_be_bytes().to_vec();
            out.extend(context.name().as_bytes());
            self.reply(option, answer::META_CONTEXT, &out)?;
        }
        if setting {
            self.chosen = Some((name, found));
        }
        self.acknowledge(option)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use vdkit_serve::ExportOptions;
    use vdkit_storage::MemoryStorage;

    use super::*;
    use crate::channel::Socket;
    use crate::poll::POLL_MAX;

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let (magic, len) = (wire::OPTION_MAGIC.to_be_bytes(), data.len() as u32);
        [&magic[..], &number.to_be_bytes(), &len.to_be_bytes(), data].concat()
    }

    /// The greeting is not repeated within TLS, and neither is the client's answer to it.
    #[test]
    fn what_a_client_said_before_tls_holds_within_it() {
        let disk = vdkit_testkit::disks::qcow2(Arc::new(MemoryStorage::new("image")), 1 << 20, "");
        let exports = Exports::new(vec![Export::new(disk, ExportOptions::default())]);
        for (flags, padding) in [(handshake::FIXED_NEWSTYLE, 124), (3, 0)] {
            let (here, mut there) = UnixStream::pair().unwrap();
            let socket = Socket::new(here, POLL_MAX);
            let until = Instant::now() + HANDSHAKE_TIME;
            there.write_all(&u32::from(flags).to_be_bytes()).unwrap();
            there.write_all(&option(option::STARTTLS, b"")).unwrap();
            there.write_all(&option(option::EXPORT_NAME, b"")).unwrap();
            let reach = |_: &Export| Ok(());
            let begin = |state| Handshake::new(&socket, &exports, state, until, &reach);
            let Outcome::StartTls(greeted) = begin(TlsState::Required).run(None).unwrap() else {
                panic!("no TLS")
            };
            begin(TlsState::Active).run(Some(greeted)).unwrap().agreed().expect("an export");
            drop(socket);
            let mut sent = Vec::new();
            there.read_to_end(&mut sent).unwrap();
            // The greeting, and the reply to STARTTLS.
            assert_eq!(sent.len(), 18 + 20 + 10 + padding);
        }
    }
}
