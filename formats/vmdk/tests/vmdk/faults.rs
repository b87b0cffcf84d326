//! EIO and ENOSPC at each storage operation in turn.

use vdkit_testbase::trials::FaultScript;

use super::{SHAPES, audit};

#[test]
fn each_operation_may_fail_and_work_later() {
    for shape in SHAPES {
        FaultScript {
            name: &format!("{shape:?}"),
            image: &|| shape.image(),
            open: &|storage| shape.open(storage),
            content: &shape.first_content(),
            audit: &|image, what| audit(image, false, what),
        }
        .each_operation_may_fail_and_work_later();
    }
}
