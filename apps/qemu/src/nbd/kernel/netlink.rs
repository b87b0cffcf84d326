//! Messages of generic netlink: <https://docs.kernel.org/userspace-api/netlink/intro.html>. Numbers
//! are the host's own (little-endian on most); everything is padded to four bytes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Bytes of `struct nlmsghdr` and `struct genlmsghdr`.
const HEADER_BYTES: usize = 16;
const COMMAND_BYTES: usize = 4;
/// Bytes of `struct nlattr`.
const ATTRIBUTE_BYTES: usize = 4;
/// The most that one answer has.
const ANSWER_BYTES: usize = 32 << 10;

/// `NLMSG_ERROR`: an error, or with the number 0 the confirmation.
const ERROR: u16 = 2;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const REQUEST_AND_CONFIRM: u16 = 0x1 | 0x4;
/// `NLA_F_NESTED`: the attribute holds attributes.
const NESTED: u16 = 1 << 15;
/// The two highest bits of an attribute's type are flags.
const TYPE_MASK: u16 = 0x3fff;

/// `GENL_ID_CTRL`, the family that names the others, and its command `CTRL_CMD_GETFAMILY`.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
/// `CTRL_ATTR_FAMILY_ID` and `CTRL_ATTR_FAMILY_NAME`.
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// With one more, of these bytes.
    #[must_use]
    pub fn with(mut self, kind: u16, value: &[u8]) -> Self {
        let len = (ATTRIBUTE_BYTES + value.len()) as u16;
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// With a number of 32 bits.
    #[must_use]
    pub fn with_u32(self, kind: u16, value: u32) -> Self {
        self.with(kind, &value.to_ne_bytes())
    }

    /// With a number of 64 bits.
    #[must_use]
    pub fn with_u64(self, kind: u16, value: u64) -> Self {
        self.with(kind, &value.to_ne_bytes())
    }

    #[must_use]
    pub fn with_nested(self, kind: u16, inner: &Self) -> Self {
        self.with(kind | NESTED, &inner.0)
    }

    /// Takes received bytes, to be searched.
    pub fn received(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// The first attribute of this kind. What is not well-formed ends the search.
    pub fn get(&self, kind: u16) -> Option<&[u8]> {
        let mut rest = &self.0[..];
        while let Some(head) = rest.get(..ATTRIBUTE_BYTES) {
            let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
            let found = u16::from_ne_bytes([head[2], head[3]]) & TYPE_MASK;
            let value = rest.get(ATTRIBUTE_BYTES..len)?;
            if found == kind {
                return Some(value);
            }
            rest = rest.get(len.next_multiple_of(4)..)?;
        }
        None
    }
}

/// A message with both headers.
pub fn message(family: u16, command: u8, number: u32, attributes: &Attributes) -> Vec<u8> {
    let len = HEADER_BYTES + COMMAND_BYTES + attributes.0.len();
    let mut bytes = Vec::with_capacity(len);
    bytes.extend((len as u32).to_ne_bytes());
    bytes.extend(family.to_ne_bytes());
    bytes.extend(REQUEST_AND_CONFIRM.to_ne_bytes());
    bytes.extend(number.to_ne_bytes());
    // The sender's address: the kernel knows it.
    bytes.extend(0_u32.to_ne_bytes());
    // Version 1 of the family, and two reserved bytes.
    bytes.extend([command, 1, 0, 0]);
    bytes.extend(&attributes.0);
    bytes
}

/// A received message.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The error's number; 0 confirms.
    End(i32),
    Data(Attributes),
}

/// Splits received bytes into the answers to the message `number`.
fn answers(mut bytes: &[u8], number: u32) -> Vec<Answer> {
    let word = |bytes: &[u8], at: usize| {
        bytes.get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
    };
    let mut found = Vec::new();
    while let (Some(len), Some(kind), Some(answered)) =
        (word(bytes, 0), bytes.get(4..6), word(bytes, 8))
    {
        let Some(body) = bytes.get(HEADER_BYTES..len as usize) else { break };
        match u16::from_ne_bytes([kind[0], kind[1]]) {
            _ if answered != number => {}
            ERROR => found.extend(word(body, 0).map(|code| Answer::End(-(code as i32)))),
            _ => found.extend(
                body.get(COMMAND_BYTES..).map(|bytes| Answer::Data(Attributes::received(bytes))),
            ),
        }
        bytes = bytes.get((len as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// A connection to the kernel's generic netlink, or to a test.
#[derive(Debug)]
pub struct Netlink<F> {
    socket: F,
    number: u32,
}

impl Netlink<OwnedFd> {
    pub fn connect() -> io::Result<Self> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, kind, flags, Some(netlink::GENERIC))?;
        rustix::net::connect(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self::over(socket))
    }
}

impl<F: AsFd> Netlink<F> {
    /// Over a socket that keeps messages apart.
    pub fn over(socket: F) -> Self {
        Self { socket, number: 0 }
    }

    /// Sends a command and waits for its confirmation. Returns the attributes that came before.
    pub fn request(
        &mut self,
        family: u16,
        command: u8,
        attributes: &Attributes,
    ) -> io::Result<Attributes> {
        self.number += 1;
        let bytes = message(family, command, self.number, attributes);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty())?;
        let mut data = Attributes::default();
        let mut buffer = vec![0; ANSWER_BYTES];
        loop {
            let (got, _) =
                match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                    Err(rustix::io::Errno::INTR) => continue,
                    other => other?,
                };
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            for answer in answers(&buffer[..got], self.number) {
                match answer {
                    Answer::End(0) => return Ok(data),
                    Answer::End(code) => return Err(io::Error::from_raw_os_error(code)),
                    Answer::Data(found) => data = found,
                }
            }
        }
    }

    /// The number of the family of this name.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if the kernel has none.
    pub fn family(&mut self, name: &str) -> io::Result<u16> {
        let name = [name.as_bytes(), &[0]].concat();
        let wanted = Attributes::default().with(FAMILY_NAME, &name);
        let answer = self.request(CONTROL, GET_FAMILY, &wanted)?;
        match answer.get(FAMILY_ID) {
            Some(&[low, high]) => Ok(u16::from_ne_bytes([low, high])),
            _ => Err(io::Error::other("the kernel's answer has no number of the family")),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An answer as the kernel sends it.
    pub(in super::super) fn answer(kind: u16, number: u32, body: &[u8]) -> Vec<u8> {
        let len = (HEADER_BYTES + body.len()) as u32;
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0, 0]);
        bytes.extend(number.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn attributes_are_padded_and_found_again() {
        let inner = Attributes::default().with_u32(1, 7);
        let all = Attributes::default()
            .with(2, b"nbd\0x")
            .with_u64(3, 1 << 40)
            .with_nested(4, &Attributes::default().with_nested(1, &inner));
        assert_eq!(all.0.len(), 12 + 12 + 16);
        assert_eq!(all.get(2), Some(&b"nbd\0x"[..]));
        assert_eq!(all.get(3), Some(&(1_u64 << 40).to_ne_bytes()[..]));
        let item = Attributes::received(all.get(4).unwrap());
        let item = Attributes::received(item.get(1).unwrap());
        assert_eq!(item.get(1), Some(&7_u32.to_ne_bytes()[..]));
        assert_eq!(all.get(5), None);
        // A length past the end, and one that is too short to go on.
        for bad in [[200, 0, 1, 0], [0, 0, 1, 0], [3, 0, 9, 0]] {
            assert_eq!(Attributes::received(&bad).get(1), None, "{bad:?}");
            assert_eq!(Attributes::received(&bad).get(7), None, "{bad:?}");
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_question_for_a_family_is_as_the_kernel_documents_it() {
        let wanted = Attributes::default().with(FAMILY_NAME, b"nbd\0");
        let bytes = message(CONTROL, GET_FAMILY, 1, &wanted);
        let header = [28, 0, 0, 0, 0x10, 0, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 1, 0, 0];
        let name = [8, 0, 2, 0, b'n', b'b', b'd', 0];
        assert_eq!(bytes, [&header[..], &name].concat());
    }

    #[test]
    fn answers_to_other_messages_and_cut_ones_are_passed_over() {
        let mut bytes = answer(ERROR, 1, &0_i32.to_ne_bytes());
        bytes.extend(answer(ERROR, 2, &(-2_i32).to_ne_bytes()));
        assert_eq!(answers(&bytes, 2), [Answer::End(2)]);
        assert_eq!(answers(&bytes[..bytes.len() - 1], 2), []);
        assert_eq!(answers(&[], 1), []);
    }
}
