//! Conversion to nothing: reading, finding holes and zeroes, and deciding.

use anyhow::Result;

use super::Save;
use crate::images;
use crate::options::{Group, Options};
use crate::pair::{self, Candidate, CellName};
use crate::process::Program;
use crate::scratch::Scratch;

/// Every classic image to nothing.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    let bytes = options.image_bytes;
    for image in images::classic(options, scratch)? {
        let job = format!("{}→null", image.shape);
        let name = CellName::new(Group::Null, job, image.content, scratch.file_system);
        if !options.wants_job(&name.job) {
            continue;
        }
        let vdkit = Program::new(&options.vdkit)
            .args(["convert", "-f", image.format])
            .arg(&image.path)
            .arg("null:");
        let qemu = Program::new(&options.qemu_img)
            // Without `--target-is-zero` it would also write zeroes to the null device.
            .args(["convert", "-n", "--target-is-zero", "-f", image.format])
            .arg(&image.path)
            .args(["--target-image-opts", &format!("driver=null-co,size={bytes}")]);
        let candidates = vec![Candidate::new("vdkit", vdkit), Candidate::new("qemu-img", qemu)];
        save(pair::measure(name, bytes, scratch, options.runs(Group::Null), candidates)?)?;
    }
    Ok(())
}
