//! Checks of references to other files.

use super::Findings;
use super::code::{Code, InspectFinding};

/// The code of a name that no policy allows.
fn shape(name: &str) -> Option<Code> {
    if name.starts_with("json:") {
        return Some(Code::ReferenceJson);
    }
    // As QEMU parses names: a colon before the first slash ends a protocol name.
    if name.split('/').next().is_some_and(|first| first.contains(':')) {
        return Some(Code::ReferenceProtocol);
    }
    if name.starts_with(['/', '\\']) {
        return Some(Code::ReferenceAbsolute);
    }
    name.split(['/', '\\']).any(|part| part == "..").then_some(Code::ReferenceParent)
}

/// Judges a name stored at `offset`.
pub(super) fn judge(findings: &mut Findings, what: &str, name: &str, offset: u64) {
    let Some(code) = shape(name) else { return };
    InspectFinding::new(code)
        .at(offset)
        .found(format!("{what} '{name}'"))
        .expected("no reference, or a plain name beneath the image's own folder")
        .add_to(findings);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_by_what_they_would_open() {
        for (name, code) in [
            ("base.qcow2", None),
            ("images/base.qcow2", None),
            ("a..b", None),
            ("dir/with:colon", None),
            ("json:{\"driver\":\"host_device\"}", Some(Code::ReferenceJson)),
            ("nbd://host/export", Some(Code::ReferenceProtocol)),
            ("fat:rw:/etc", Some(Code::ReferenceProtocol)),
            ("file:base", Some(Code::ReferenceProtocol)),
            ("C:\\disk", Some(Code::ReferenceProtocol)),
            ("/etc/shadow", Some(Code::ReferenceAbsolute)),
            ("\\\\host\\share", Some(Code::ReferenceAbsolute)),
            ("../base", Some(Code::ReferenceParent)),
            ("a/../../b", Some(Code::ReferenceParent)),
            ("a\\..\\b", Some(Code::ReferenceParent)),
        ] {
            assert_eq!(shape(name), code, "{name}");
        }
    }
}
