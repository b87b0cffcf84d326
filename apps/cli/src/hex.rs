//! Hex dumps in the format of `hexdump -C`.

use std::fmt::Write as _;

use crate::output::Output;

const WIDTH: usize = 16;

/// Prints a hex dump piece by piece. A run of equal rows is printed as one `*`.
#[derive(Debug, Default)]
pub struct HexDump {
    last: Option<[u8; WIDTH]>,
    starred: bool,
}

impl HexDump {
    /// Prints the bytes at offset `at`. Each piece but the last has whole rows.
    pub fn print(&mut self, at: u64, bytes: &[u8], out: &mut Output) {
        for (i, row) in bytes.chunks(WIDTH).enumerate() {
            if let Ok(whole) = <[u8; WIDTH]>::try_from(row) {
                if self.last == Some(whole) {
                    if !std::mem::replace(&mut self.starred, true) {
                        out.line("*");
                    }
                    continue;
                }
                self.last = Some(whole);
            }
            self.starred = false;
            out.line(row_text(at + (i * WIDTH) as u64, row));
        }
    }

    /// Prints the end offset.
    pub fn end(self, at: u64, out: &mut Output) {
        out.line(format!("{at:08x}"))
    }
}

fn row_text(at: u64, row: &[u8]) -> String {
    let mut text = format!("{at:08x} ");
    for i in 0..WIDTH {
        if i % 8 == 0 {
            text.push(' ');
        }
        match row.get(i) {
            // Writing to a string cannot fail.
            Some(byte) => _ = write!(text, "{byte:02x} "),
            None => text.push_str("   "),
        }
    }
    text.push_str(" |");
    let shown = |&b: &u8| if b.is_ascii_graphic() || b == b' ' { b as char } else { '.' };
    text.extend(row.iter().map(shown));
    text.push('|');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_familiar_shape() {
        assert_eq!(
            row_text(0x200, b"0123456789ABCDEF"),
            "00000200  30 31 32 33 34 35 36 37  38 39 41 42 43 44 45 46  |0123456789ABCDEF|"
        );
        assert_eq!(
            row_text(0, b"\x00\xffA"),
            "00000000  00 ff 41                                          |..A|"
        );
    }
}
