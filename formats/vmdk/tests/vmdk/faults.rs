//! EIO and ENOSPC at each storage operation in turn.

use vdkit_testbase::trials::FaultScript;
use vdkit_vmdk::VmdkDriver;

use super::SHAPES;

#[test]
fn each_operation_may_fail_and_work_later() {
    for shape in SHAPES {
        FaultScript {
            name: &format!("{shape:?}"),
            driver: &VmdkDriver,
            image: &|| shape.image(),
            open: &|storage| shape.open(storage),
            content: &shape.first_content(),
        }
        .each_operation_may_fail_and_work_later();
    }
}
