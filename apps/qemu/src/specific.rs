//! What QEMU's answers say of a format alone (`format-specific`).

use vdkit::ChainLink;

use crate::json::{Dict, Value};

/// The members of `format-specific.data`; `None` for formats that have none.
pub fn of(link: &ChainLink) -> Option<Dict> {
    match link.info.format {
        "qcow2" => Some(qcow2(link)),
        _ => None,
    }
}

/// Files of guest data beneath an image, by QEMU's names: (name, file, bytes, allocated bytes), in the
/// order in which QEMU lists them.
pub fn extent_files(_link: &ChainLink) -> Vec<(String, String, u64, u64)> {
    Vec::new()
}

/// The value of a property.
fn property<'a>(link: &'a ChainLink, key: &str) -> Option<&'a str> {
    link.info.properties.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
}

fn switch(link: &ChainLink, key: &str) -> Option<bool> {
    property(link, key).map(|value| value == "true")
}

fn qcow2(link: &ChainLink) -> Dict {
    let info = &link.info;
    let version3 = property(link, "compat") == Some("1.1");
    let bits = property(link, "refcount-bits").and_then(|bits| bits.parse::<u64>().ok());
    let bitmaps: Vec<Value> = info
        .bitmaps
        .iter()
        .map(|bitmap| {
            let flags = [(bitmap.in_use, "in-use"), (bitmap.enabled, "auto")];
            let flags: Vec<Value> =
                flags.iter().filter(|(on, _)| *on).map(|(_, name)| (*name).into()).collect();
            Dict::default()
                .with("name", bitmap.name.as_str())
                .with("granularity", bitmap.granularity)
                .with("flags", flags)
                .into()
        })
        .collect();
    let mut dict = Dict::default()
        .with_some("compat", property(link, "compat"))
        .with("compression-type", info.compression.unwrap_or("zlib"));
    if !version3 {
        return dict.with_some("refcount-bits", bits);
    }
    dict = dict.with_some("lazy-refcounts", switch(link, "lazy-refcounts"));
    if !bitmaps.is_empty() {
        dict.put("bitmaps", bitmaps);
    }
    dict.with_some("refcount-bits", bits)
        .with("corrupt", info.corrupt)
        .with_some("extended-l2", switch(link, "extended-l2"))
        .with_some("data-file", info.files.first().map(String::as_str))
        .with_some("data-file-raw", (!info.files.is_empty()).then_some(info.data_file_raw))
}
