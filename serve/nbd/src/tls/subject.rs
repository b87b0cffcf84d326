//! The subject of a certificate as text, in the form in which GnuTLS writes it: the parts in the
//! order of the certificate, escaped by RFC 4514.

/// Attribute types (RFC 4519 and PKCS #9) by the bytes of their object identifiers.
const NAMES: &[(&[u8], &str)] = &[
    (&[0x55, 4, 3], "CN"),
    (&[0x55, 4, 4], "surName"),
    (&[0x55, 4, 5], "serialNumber"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 9], "street"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
    (&[0x55, 4, 12], "title"),
    (&[0x55, 4, 13], "description"),
    (&[0x55, 4, 17], "postalCode"),
    (&[0x55, 4, 41], "name"),
    (&[0x55, 4, 42], "givenName"),
    (&[0x55, 4, 43], "initials"),
    (&[0x55, 4, 44], "generationQualifier"),
    (&[0x55, 4, 46], "dnQualifier"),
    (&[0x55, 4, 65], "pseudonym"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1], "EMAIL"),
    (&[9, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 1], "UID"),
    (&[9, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25], "DC"),
];

/// Tags of DER.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 6;
const VERSION: u8 = 0xa0;
const UTF8_STRING: u8 = 12;
const PRINTABLE_STRING: u8 = 19;
const IA5_STRING: u8 = 22;

/// Takes one element: its tag, its content, and all of its bytes.
fn element<'d>(der: &mut &'d [u8]) -> Option<(u8, &'d [u8], &'d [u8])> {
    let whole = *der;
    let (&tag, rest) = whole.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (len, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x84 => {
            let (len, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            (len.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    *der = rest;
    Some((tag, content, &whole[..whole.len() - rest.len()]))
}

/// Takes an element of this tag, and returns its content.
fn expect<'d>(der: &mut &'d [u8], tag: u8) -> Option<&'d [u8]> {
    element(der).filter(|(found, ..)| *found == tag).map(|(_, content, _)| content)
}

/// The subject of a certificate (DER); `None` if the bytes are no certificate.
pub(super) fn of(certificate: &[u8]) -> Option<String> {
    let mut whole = certificate;
    let mut signed = expect(&mut whole, SEQUENCE)?;
    let mut body = expect(&mut signed, SEQUENCE)?;
    if body.first() == Some(&VERSION) {
        element(&mut body)?;
    }
    // Serial number, signature algorithm, issuer, validity.
    for _ in 0..4 {
        element(&mut body)?;
    }
    let mut names = expect(&mut body, SEQUENCE)?;
    let mut parts = Vec::new();
    while !names.is_empty() {
        let mut set = expect(&mut names, SET)?;
        let mut values = Vec::new();
        while !set.is_empty() {
            values.push(attribute(expect(&mut set, SEQUENCE)?)?);
        }
        parts.push(values.join("+"));
    }
    Some(parts.join(","))
}

/// `TYPE=VALUE` of one attribute.
fn attribute(mut der: &[u8]) -> Option<String> {
    let kind = expect(&mut der, OBJECT_IDENTIFIER)?;
    let (tag, content, whole) = element(&mut der)?;
    let name = NAMES.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name);
    let text = match tag {
        UTF8_STRING | PRINTABLE_STRING | IA5_STRING => std::str::from_utf8(content).ok(),
        _ => None,
    };
    match (name, text) {
        (Some(name), Some(text)) => Some(format!("{name}={}", escaped(text))),
        // Values without a text form are written as their bytes.
        (name, _) => {
            let name = name.map_or_else(|| dotted(kind), str::to_owned);
            let hex: String = whole.iter().map(|byte| format!("{byte:02x}")).collect();
            Some(format!("{name}=#{hex}"))
        }
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    for (at, letter) in text.char_indices() {
        let last = at + letter.len_utf8() == text.len();
        let edge = letter == ' ' && (at == 0 || last) || letter == '#' && at == 0;
        if edge || matches!(letter, ',' | '+' | '"' | '\\' | '<' | '>' | ';') {
            out.push('\\');
        }
        out.push(letter);
    }
    out
}

/// An object identifier in numbers.
fn dotted(bytes: &[u8]) -> String {
    let mut numbers: Vec<u64> = Vec::new();
    let mut number = 0_u64;
    for byte in bytes {
        number = number << 7 | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            if numbers.is_empty() {
                let first = (number / 40).min(2);
                numbers.extend([first, number - first * 40]);
            } else {
                numbers.push(number);
            }
            number = 0;
        }
    }
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn der(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
        let content = parts.concat();
        let mut out = vec![tag, 0x82, (content.len() >> 8) as u8, content.len() as u8];
        out.extend(content);
        out
    }

    fn part(kind: &[u8], tag: u8, text: &str) -> Vec<u8> {
        let pair = [der(OBJECT_IDENTIFIER, &[kind]), der(tag, &[text.as_bytes()])].concat();
        der(SEQUENCE, &[&pair])
    }

    #[test]
    fn a_subject_is_written_as_gnutls_writes_it() {
        let first = der(SET, &[&part(&[0x55, 4, 6], PRINTABLE_STRING, "GB")]);
        let second = der(SET, &[&part(&[0x55, 4, 10], UTF8_STRING, " x#;<>=\"\\é ")]);
        let third = der(
            SET,
            &[
                &part(&[0x55, 4, 3], UTF8_STRING, "client"),
                &part(&[0x55, 4, 11], UTF8_STRING, "#u"),
            ],
        );
        let unknown = der(SET, &[&part(&[0x2a, 0x86, 0x48, 1], UTF8_STRING, "a")]);
        let subject = der(SEQUENCE, &[&first, &second, &third, &unknown]);
        let empty = der(SEQUENCE, &[]);
        let body = der(
            SEQUENCE,
            &[&der(VERSION, &[]), &der(2, &[&[1]]), &empty, &empty, &empty, &subject],
        );
        let certificate = der(SEQUENCE, &[&body]);
        assert_eq!(
            of(&certificate).unwrap(),
            "C=GB,O=\\ x#\\;\\<\\>=\\\"\\\\é\\ ,CN=client+OU=\\#u,1.2.840.1=#0c82000161"
        );
        for cut in 0..certificate.len() {
            assert_eq!(of(&certificate[..cut]), None);
        }
    }
}
