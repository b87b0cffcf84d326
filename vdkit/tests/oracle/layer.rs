//! One image of a chain, as options.

use vdkit_block::Codec;

/// Its format and version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Raw,
    V2,
    V3,
}

/// Location of guest data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    Inside,
    Outside,
    OutsideRaw,
}

pub const CLUSTERS: [u64; 4] = [64 << 10, 512, 4 << 10, 2 << 20];
pub const REFCOUNT_BITS: [u32; 3] = [16, 1, 64];

/// The options of one image.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its file name without extension.
    pub name: &'static str,
    pub kind: Kind,
    pub cluster: u64,
    pub extended: bool,
    pub refcount_bits: u32,
    pub data: Data,
    /// Compression method of some of its clusters.
    pub compressed: Option<Codec>,
    pub lazy: bool,
    pub preallocation: &'static str,
}

impl Layer {
    pub fn file(&self) -> String {
        format!("{}.{}", self.name, self.format())
    }

    pub fn format(&self) -> &'static str {
        if self.kind == Kind::Raw { "raw" } else { "qcow2" }
    }

    /// Options for `-o` that both programs accept.
    pub fn options(&self) -> String {
        if self.kind == Kind::Raw {
            return String::new();
        }
        let on = |flag| if flag { "on" } else { "off" };
        let mut options = vec![
            format!("compat={}", if self.kind == Kind::V2 { "0.10" } else { "1.1" }),
            format!("cluster_size={}", self.cluster),
        ];
        if self.kind == Kind::V3 {
            options.push(format!("refcount_bits={}", self.refcount_bits));
            options.push(format!("extended_l2={}", on(self.extended)));
            options.push(format!("lazy_refcounts={}", on(self.lazy)));
            let zstd = self.compressed == Some(Codec::Zstd);
            options.push(format!("compression_type={}", if zstd { "zstd" } else { "zlib" }));
        }
        if self.data != Data::Inside {
            options.push(format!("data_file={}-data.raw", self.name));
        }
        if self.data == Data::OutsideRaw {
            options.push("data_file_raw=on".into());
        }
        if self.preallocation != "off" {
            options.push(format!("preallocation={}", self.preallocation));
        }
        options.join(",")
    }
}
