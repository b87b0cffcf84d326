//! Parsing untrusted XML, and escaping text.

use roxmltree::{Document, Node, ParsingOptions};
use vdkit_block::{Error, Result, require_within};

/// Maximum elements and texts of a descriptor; one with ten disks has some 300.
const NODES_MAX: u32 = 100_000;
/// Maximum attributes of an element: the parser compares each with all others.
const ATTRIBUTES_MAX: usize = 512;
/// Maximum namespaces: elements inherit them.
const NAMESPACES_MAX: usize = 256;

/// Parses a document without a document type (so only XML's own five entities), with limits on what
/// costs more than its bytes.
///
/// # Errors
/// [`Error::Corrupt`] for invalid XML, [`Error::Limit`] for too large documents,
/// [`Error::Unsupported`] for an encoding other than UTF-8.
pub(crate) fn parse<'a>(file: &str, offset: u64, bytes: &'a [u8]) -> Result<Document<'a>> {
    let text = std::str::from_utf8(bytes).map_err(|_| {
        Error::unsupported(
            file,
            "has a descriptor that is not encoded in UTF-8",
            "convert it, as with 'iconv -t UTF-8', and pack the appliance again",
        )
    })?;
    check_cost(file, text)?;
    // DTDs are off; nothing else expands a document.
    let options =
        ParsingOptions { allow_dtd: false, nodes_limit: NODES_MAX, ..ParsingOptions::default() };
    Document::parse_with_options(text.trim_start_matches('\u{feff}'), options).map_err(|error| {
        let expected = "an XML document without a document type";
        Error::corrupt(file, offset, "OVF descriptor", error.to_string(), expected)
    })
}

/// Fails if parsing would cost more than linear time. (Depth is harmless: the parser does not
/// recurse.)
fn check_cost(file: &str, text: &str) -> Result<()> {
    let within =
        |what, found: usize, limit: usize| require_within(file, what, found as u64, limit as u64);
    let namespaces = text.matches("xmlns").count();
    within("number of XML namespaces of the OVF descriptor", namespaces, NAMESPACES_MAX)?;
    for piece in text.split('<') {
        // A value is quoted and contains no `<`. In comments and texts this may overcount.
        let quoted = |rest: &&str| rest.trim_start().starts_with(['"', '\'']);
        let attributes = piece.split('=').skip(1).filter(quoted).count();
        within("number of attributes of an XML element", attributes, ATTRIBUTES_MAX)?;
    }
    Ok(())
}

/// Child elements with this name in any namespace: OVF 0.9, 1 and 2 use different ones.
pub(crate) fn children<'a, 'i: 'a>(
    node: Node<'a, 'i>,
    name: &'a str,
) -> impl Iterator<Item = Node<'a, 'i>> {
    node.children().filter(move |child| child.is_element() && child.tag_name().name() == name)
}

/// An attribute by its name, in any namespace.
pub(crate) fn attribute<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    node.attributes().find(|attribute| attribute.name() == name).map(|found| found.value())
}

/// Escapes text for an element or a double-quoted value.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // XML 1.0 cannot represent these.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn fails(text: &str, words: &str) {
        let started = Instant::now();
        let error = parse("a.ova", 512, text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20), "{words}");
    }

    #[test]
    fn bombs_do_not_go_off() {
        let laughs = "<!DOCTYPE a [<!ENTITY b 'xxxxxxxx'><!ENTITY c '&b;&b;'>]><a>&c;</a>";
        fails(laughs, "document type");
        fails("<!DOCTYPE a SYSTEM 'file:///etc/passwd'><a/>", "document type");
        fails("<a>&b;</a>", "OVF descriptor");
        fails(&"<a>".repeat(200_000), "nodes");
        let attributes: String = (0..100_000).map(|i| format!(" a{i}=''")).collect();
        fails(&format!("<a{attributes}/>"), "attributes");
        let spaces: String = (0..100_000).map(|i| format!(" x:a{i} = \"\"")).collect();
        fails(&format!("<a{spaces}/>"), "attributes");
        let namespaces: String = (0..1000).map(|i| format!("<a xmlns:n{i}='u{i}'/>")).collect();
        fails(&format!("<a>{namespaces}</a>"), "namespaces");
        fails(&format!("<a>{}</a>", "<b/>".repeat(200_000)), "nodes");
    }

    #[test]
    fn as_much_as_is_allowed_is_parsed_quickly() {
        let attributes: String = (0..500).map(|i| format!(" a{i}=''")).collect();
        let elements = format!("<b{attributes}/>").repeat(800);
        let depth = format!("{}{}", "<c>".repeat(90_000), "</c>".repeat(90_000));
        let text = format!("<a>{elements}{depth}</a>");
        let started = Instant::now();
        let document = parse("a.ova", 0, text.as_bytes()).unwrap();
        assert_eq!(document.descendants().filter(|node| node.has_tag_name("c")).count(), 90_000);
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn other_encodings_and_other_things_are_refused() {
        let bytes = b"\xff\xfe<\0a\0/\0>\0";
        assert!(parse("a.ova", 0, bytes).unwrap_err().to_string().contains("UTF-8"));
        fails("", "OVF descriptor at offset 0x200");
        fails("<a>", "OVF descriptor");
        fails("hello", "OVF descriptor");
        assert!(parse("a", 0, "\u{feff}<a/>".as_bytes()).is_ok());
    }

    #[test]
    fn texts_survive_a_round_trip() {
        let text = "a & <b> \"c\" 'd' \u{e4}";
        let document = format!("<a b=\"{}\">{}</a>", escaped(text), escaped(text));
        let document = parse("a", 0, document.as_bytes()).unwrap();
        let root = document.root_element();
        assert_eq!((root.text(), attribute(root, "b")), (Some(text), Some(text)));
        assert_eq!(escaped("a\u{7}\nb\u{ffff}"), "a  b ");
    }
}
